"""The controller: name the bottleneck, try what treats it, keep or undo, try the whole plan, keep watching.

`decisions` is a generator that yields an `Action` and is sent its `Result`. It knows nothing of models, loaders or
clocks, so tests can drive it with a simulated loop. What a search knows is in one `SearchState`; its picture is there.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import replace

from accel.profiler.trial import Verdict
from accel.run.host_load import SHORTEST_LOOK_S, HostLoad
from accel.search import costs, outlook, priority, verdicts
from accel.search.actions import Action, Decisions, Result
from accel.search.experiment import Interrupted, act, ask_for_more, close, has_news, look, searching, trial, watching
from accel.search.plan import without
from accel.search.state import Candidate, CandidateStage, SearchState
from accel.search.trying import affordable_recipe, consider, follow_recipe, recall, take_over, try_settings

_GLANCE = 2
"""Steps after which the host is looked at for the first time, if they take long enough."""
_IDLE = 10
"""Times the usual rest, while nothing is on or waits: steps may be longer by then."""
_WINDOW = 3
"""Medians by which the usual step time is known, and from which on slower ones in a row count."""


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
    yield from _hold(state)
    state.searching = True


# -- observe -----------------------------------------------------------------------------------------------------------


def _observe(state: SearchState) -> Decisions:
    if watching(state):
        yield from _glance(state)
    yield from look(state)
    if state.replay is not None:
        return
    if beginning := outlook.beginning(state):
        state.say(beginning)
    yield from recall(state)
    yield from _follow(state)
    if not state.plan:
        yield from _begin_affordably(state)
        yield from _follow(state)
    for candidate in state.candidates.values():
        if candidate.name not in state.plan:
            candidate.refused = candidate.refusal()


def _glance(state: SearchState) -> Decisions:
    """Look at the host first of all: where threads wait for each other, steps are too slow to observe many."""
    result = yield from look(state, steps=_GLANCE)
    if result.load is None and state.plain_ms > 0:
        rest = min(state.pace.recheck, math.ceil(SHORTEST_LOOK_S / state.plain_s))
        yield from act(state, Action(plan={}, rest=rest, steps=1))
    if has_news(state):
        state.recollection.recall()
        remembered = state.recollection.choices(state.candidates)
        if all(state.candidates[name].design.order for name in remembered):  # else that comes first, as a whole
            yield from _follow(state)


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
    for candidate in state.pending():
        # One-off work beside the loop costs something: that begins in its turn.
        if not candidate.design.cost_s and not candidate.refusal() and not priority.too_little(state, candidate):
            candidate.waits()  # begins what that takes, which costs next to nothing, while others are tried
    while True:
        yield from _follow(state)
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
    state.note("the loader, batch shape, world size or thread count changed: searching again")
    if state.announced:
        state.say("the loader, the batch shape or the thread count changed: the search starts again")
    state.reopened += 1
    verdicts.remember(state)  # what was found under the earlier conditions
    state.searching, state.searched_until = True, 0
    state.plan, state.new_batches, state.announced = {}, 0, {}
    state.closing, state.closed_plan, state.last_trial = None, {}, None
    state.recipe.begin_again()
    for candidate in state.candidates.values():
        candidate.begin_again()
        if (watch := candidate.design.watch) is not None:
            watch.begin_again()


# -- hold --------------------------------------------------------------------------------------------------------------


class StepLevel:
    """Learn the usual step time from three medians, and report when three in a row are slower.

    Args:
        slower: how many times the usual step time is slower.
    """

    def __init__(self, slower: float) -> None:
        self._slower = slower
        self._medians_ms: deque[float] = deque(maxlen=_WINDOW)
        self._usual_ms: float | None = None

    @property
    def is_open(self) -> bool:
        """True if the usual step time is not known yet, or the last median was slow: measure again soon."""
        if self._usual_ms is None:
            return True
        return bool(self._medians_ms) and self._medians_ms[-1] > self._slower * self._usual_ms

    def add(self, median_ms: float) -> str:
        """Add a median; return how the step became slower, '' if it did not."""
        self._medians_ms.append(median_ms)
        usual_ms, fastest_ms = self._usual_ms, min(self._medians_ms)
        if len(self._medians_ms) < _WINDOW or (usual_ms is not None and fastest_ms <= self._slower * usual_ms):
            return ""
        if usual_ms is None:
            self._usual_ms = statistics.median(self._medians_ms)
        self._medians_ms.clear()
        return "" if usual_ms is None else f"the step became slower ({usual_ms:.3g} → {fastest_ms:.3g} ms)"

    def begin_again(self) -> None:
        """Learn the usual step time again: what was measured ran under another plan."""
        self._usual_ms = None
        self._medians_ms.clear()


def _hold(state: SearchState) -> Decisions:
    """Keep the plan on, checking it, until something can be tried that had to wait."""
    state.last_trial = None
    level, step_s, seconds = StepLevel(state.pace.slower), state.plain_s, list[float]()
    gap = state.pace.recheck  # from one later check by the guard to the next: ever larger
    next_check = state.steps + gap
    while True:
        yield from ask_for_more(state)
        if state.plan and state.steps >= next_check:
            yield from _check_again(state)
            gap *= 2
            next_check = state.steps + gap
            level.begin_again()
            continue
        is_preparing = any(candidate.design.is_preparing for candidate in state.pending())
        new_batches = state.new_batches
        action = _next_look(state, level, next_check, step_s)
        result = yield from act(state, action, may_grow=True)
        step_s = statistics.median(result.seconds or [step_s])
        if state.new_batches > new_batches:  # the plan is tried again soon
            next_check = min(next_check, state.steps + state.pace.recheck)
            level.begin_again()
            seconds.clear()
            continue
        plan = state.plan
        yield from _follow(state)
        if state.replay is None:
            priority.reopen_what_came_back(state, step_s)
            if _waits_no_more(state):
                return
        if result.trips or state.plan != plan:
            level.begin_again()
            seconds.clear()
        elif state.plan and not is_preparing:  # else a step's time says nothing of the plan
            seconds += result.seconds
        if len(seconds) >= state.pace.hold:  # looks at the host may have come sooner
            slower = level.add(statistics.median(seconds) * 1e3)
            seconds.clear()
            if slower:
                state.note(f"{slower}: trying the plan again")
                yield from _retry_kept(state, list(state.plan))
                level.begin_again()
        if state.replay is None and state.is_unclosed:
            yield from close(state)  # the closing trial was of a larger plan
            level.begin_again()
        verdicts.remember(state)


def _next_look(state: SearchState, level: StepLevel, next_check: int, step_s: float) -> Action:
    pace, pending = state.pace, state.pending()
    steps = pace.hold
    rest = pace.rest
    if not state.plan and not pending:  # only another loop is looked for, and a look takes 50 µs of a short step
        rest = max(rest, min(math.ceil(pace.look_s / max(step_s, 1e-6)), _IDLE * rest))
    if state.plan and level.is_open:
        rest = 0
    if watching(state):
        steps, most = pace.hold_steps(step_s, steps)
        rest = min(rest, most)
    if state.plan:
        rest = max(0, min(rest, next_check - state.steps - steps))
    if state.replay is None:
        rest = int(min(rest, max(pace.observe, costs.steps_until_affordable(state, pending) - steps)))
    return Action(plan=state.plan, rest=rest, steps=steps, after_search=True)


def _waits_no_more(state: SearchState) -> bool:
    """Tell whether something that waited can be tried now; what does not apply waits no more."""
    for candidate in state.pending():
        if candidate.stage is CandidateStage.QUEUED or not (pending := priority.why_pending(state, candidate)):
            return True
        if why := candidate.refusal():
            verdicts.give_up(state, candidate, "not applicable", why)
        elif candidate.row.status == "not tried":
            candidate.row.why = pending
    return False


def _check_again(state: SearchState) -> Decisions:
    """Let the guard look at the plan, undo it if that fails with each of the next batches, and try what is doubtful."""
    for again in range(state.pace.confirm + 1):
        action = Action(plan=state.plan, steps=1, check=dict(state.plan), after_search=True)
        result = yield from act(state, action, may_grow=True)
        if result.finding is None or not result.finding.problem or not state.plan:
            break
        if again == state.pace.confirm:
            for name in list(state.plan):
                verdicts.remove(state, name, f"the guard's later check failed: {result.finding.problem}")
    if state.new_batches:
        state.new_batches = 0
        yield from _retry_kept(state, list(state.plan))
    else:
        # Step times don't show that the machine was busy during the search and is quiet now (or the reverse).
        names = [name for name in state.plan if state.candidates[name].design.depends_on_host]
        yield from _retry_kept(state, names)


def _retry_kept(state: SearchState, names: Iterable[str]) -> Decisions:
    """Try the plan without each of these in turn, and undo those that no longer pay.

    What stands by its own trial stays. So does that without which what is dear would have to be made once more, such as
    a compiled graph, while that, which comes first, is on; and what is there for other processes, while these are.
    """
    for candidate in sorted(map(state.candidates.__getitem__, names), key=lambda each: not costs.is_dear(each)):
        if candidate.name not in state.plan or candidate.standing is not None or candidate.design.stands:
            continue
        if costs.made_for_calls(state, candidate) is not None:
            continue
        watch = candidate.design.watch
        if watch is not None and watch.is_used and watch.are_here:
            continue
        yield from _retry(state, candidate)


def _retry(
    state: SearchState, candidate: Candidate, if_much_slower: Verdict | None = None
) -> Generator[Action, Result, Verdict | None]:
    """Try the plan without a strategy, undo that if it no longer pays, and return the verdict, if there is one.

    Args:
        if_much_slower: the verdict where its first steps are much slower than those without it.
    """
    name, plan, config = candidate.name, dict(state.plan), state.config.of_kept()
    result = yield from trial(state, without(state.plan, name), plan, config=config, if_much_slower=if_much_slower)
    if result is None or result.outcome is None:
        return None
    if result.outcome.verdict == "drop":
        why = f"it no longer pays: {result.outcome.gain:.2f}x when tried again at step {state.steps}"
        verdicts.remove(state, name, why, is_slower=True)
    return result.outcome.verdict


# -- out of turn -------------------------------------------------------------------------------------------------------
#
# What a strategy's own watch of the host wants: tried when other processes come, done without when
# they leave. Neither the budget nor an earlier verdict holds that up: the one is for gains that may
# not come, the other was found under another load. Only making once more what is made for calls as
# they are, such as a compiled graph, must be affordable.


def _follow(state: SearchState) -> Decisions:
    for candidate in watching(state):
        watch = candidate.design.watch
        assert watch is not None
        load, watch.news = watch.news, None
        if load is None:
            continue
        with searching(state):
            if load.is_quiet:
                yield from _without(state, candidate)
            else:
                yield from _beside(state, candidate, load)
        if state.lasting_plan():
            state.last_trial = None  # it says nothing of these


def _beside(state: SearchState, candidate: Candidate, load: HostLoad) -> Decisions:
    """Try a strategy at length, for it is noisy here; what has not had its turn has it later, if it is not kept.

    Its trial begins with it: plain steps are slow here, and in a run that ends soon there is time for nothing else.
    """
    name, watch = candidate.name, candidate.design.watch
    assert watch is not None
    if name in state.plan or candidate.has_failed():
        return
    candidate.settings_left = None  # the settings to be tried have changed with the load
    again_s = costs.work_s(state, candidate)
    if again_s and not costs.affordable(state, again_s):
        watch.not_kept()
        return
    was_pending, watch.is_used = candidate.is_pending, True
    candidate.withdraw()
    yield from try_settings(state, candidate, replace(state.config.early(), first="B"))
    candidate.settings_left = None
    if name in state.plan:
        candidate.row.why += f", beside {load.text}"
        state.note(f"{name} {candidate.row.setting} is kept for as long as there are {load.text}")
        state.say(f"other processes keep the machine busy: {name} {candidate.row.setting} until they leave")
        candidate.stage = CandidateStage.DECIDED
    else:
        watch.not_kept()
        if was_pending and not candidate.has_failed():
            candidate.queue_again()
            return
    verdicts.conclude(state, candidate)


def _without(state: SearchState, candidate: Candidate) -> Decisions:
    state.note("the other processes have left: the plan is tried without what was kept beside them")
    verdict = yield from _retry(state, candidate, if_much_slower="drop")
    watch = candidate.design.watch
    if candidate.name not in state.plan or watch is None:
        return
    if verdict == "keep":
        watch.is_used = False
        candidate.row.why += "; faster without them too"
    else:
        watch.left_open()
