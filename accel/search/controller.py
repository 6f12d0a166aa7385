"""The controller: name the bottleneck, try what treats it, keep or undo, try the whole plan, keep watching.

`decisions` is a generator that yields an `Action` and is sent its `Result`. It knows nothing of models, loaders or
clocks, so tests can drive it with a simulated loop. What a search knows is in one `SearchState`; its picture is there.
"""

from __future__ import annotations

import math

from accel.run.host_load import SHORTEST_LOOK_S
from accel.search import costs, outlook, priority, verdicts
from accel.search.actions import Action, Decisions
from accel.search.experiment import Interrupted, act, close, has_news, look, watching
from accel.search.holding import follow, hold
from accel.search.state import BatchGrowth, CandidateStage, SearchState
from accel.search.trying import (
    affordable_recipe,
    consider,
    follow_recipe,
    recall,
    say_what_does_not_apply_anyway,
    take_over,
)

_GLANCE = 2
"""Steps after which the host is looked at for the first time, if they take long enough."""


def decisions(state: SearchState) -> Decisions:
    """Yield actions for as long as the run lasts."""
    state.elapsed_s = state.cost_s = state.startup_s()
    state.before_s = max(0.0, state.ran_s() - state.cost_s)
    is_new = True
    while True:
        try:
            if is_new:
                yield from _observe(state)
                is_new = False
            yield from _decide(state)
        except Interrupted:
            _reopen(state)
            is_new = True


def _decide(state: SearchState) -> Decisions:
    """Search, close, and hold the plan until there is a reason to search again."""
    if state.replay is not None:
        yield from take_over(state, state.replay)
    else:
        yield from _search(state)
        if state.closing is None or state.plan != state.closed_plan:
            yield from close(state)
    for candidate in state.candidates.values():
        if candidate.name not in state.plan:
            candidate.passed = None  # what is tried much later is compared again
    state.searching = False
    state.searched_until = state.steps
    verdicts.remember(state)
    yield from hold(state)
    state.searching = True


# -- observe -----------------------------------------------------------------------------------------------------------


def _observe(state: SearchState) -> Decisions:
    """Measure the plain loop, and try what an earlier run has found, or else the recipe."""
    if watching(state):
        yield from _glance(state)
    yield from look(state)
    if state.replay is not None:
        return
    if beginning := outlook.beginning(state):
        state.say(beginning)
    yield from recall(state)
    yield from follow(state)
    if not state.plan:
        yield from _begin_affordably(state)
        yield from follow(state)
    say_what_does_not_apply_anyway(state)


def _glance(state: SearchState) -> Decisions:
    """Look at the host first of all: where threads wait for each other, steps are too slow to observe many."""
    result = yield from look(state, steps=_GLANCE)
    if result.load is None and state.plain_ms > 0:
        rest = min(state.pace.recheck, math.ceil(SHORTEST_LOOK_S / state.plain_s))
        yield from act(state, Action(plan={}, rest=rest, steps=1))
    if has_news(state):
        state.recollection.recall()
        remembered = state.recollection.choices(state.candidates)
        if all(state.candidates[name].comparison.order for name in remembered):  # else that comes first, as a whole
            yield from follow(state)


def _begin_affordably(state: SearchState) -> Decisions:
    """Let the loop run until the budget allows for more than accel's start has taken, and look at it again."""
    from_s = state.budget.allowed_from(spent=state.cost_s, expected=0.0, saved=state.saved_s)
    if not state.lasted_s < from_s < math.inf or state.plain_ms <= 0 or costs.affordable(state, 0.0):
        return
    while (wait_s := from_s - state.lasted_s) > 0 and not has_news(state):
        # Wait in chunks, so that what is known is kept if the run ends early.
        rest = min(state.pace.rest, math.ceil(wait_s / state.plain_s))
        if watching(state):
            rest = min(rest, state.pace.hold_steps(state.plain_s, 1)[1])
        yield from act(state, Action(plan=state.plan, rest=rest, steps=1))
    yield from look(state)


# -- search ------------------------------------------------------------------------------------------------------------


def _search(state: SearchState) -> Decisions:
    """Try one candidate after the other, until all have been decided or have to wait."""
    for candidate in state.pending():
        # One-off work beside the loop costs something: that begins in its turn.
        if not candidate.comparison.cost_s and not candidate.refusal() and not priority.too_little(state, candidate):
            candidate.waits()  # begins what that takes, which costs next to nothing, while others are tried
    while True:
        yield from follow(state)
        priority.reopen_verdicts(state)
        if recipe := affordable_recipe(state):
            yield from follow_recipe(state, recipe)
            continue
        if (able := priority.next_candidate(state)) is not None:
            yield from consider(state, able)
            continue
        steps = costs.steps_until_affordable(state, state.pending())
        if steps > state.pace.patience:
            return
        yield from act(state, Action(plan=state.plan, rest=int(steps), steps=1))
        if priority.next_candidate(state) is None:
            return


def _reopen(state: SearchState) -> None:
    """Begin again from the plain loop: the measurements were made under other conditions."""
    state.note("the loader, batch shape, world size or thread count changed: searching again")
    if state.announced:
        state.say("the loader, the batch shape or the thread count changed: the search starts again")
    state.reopened += 1
    verdicts.remember(state)  # what was found under the earlier conditions
    state.searching, state.is_out_of_turn = True, False
    state.plan, state.growth, state.announced = {}, BatchGrowth(), {}
    state.closing, state.closed_plan, state.last_trial = None, {}, None
    state.recipe.begin_again()
    for candidate in state.candidates.values():
        if candidate.stage is CandidateStage.RULED_OUT:
            continue
        candidate.begin_again()
        if (watch := candidate.comparison.watch) is not None:
            watch.is_used = False
            watch.begin_again()
