"""Plans from outside: one that is replayed, what an earlier run has found, and the recipe of the records."""

from __future__ import annotations

from functools import partial

from accel.profiler.trial_driver import TrialResult
from accel.search import costs, priority, verdicts
from accel.search.actions import Decisions
from accel.search.experiment import charged_to, check, check_whole, close, has_news, look
from accel.search.plan import Choices
from accel.search.recipes import Recipe
from accel.search.remembered import RememberedPlan
from accel.search.state import CandidateStage, SearchState
from accel.search.trying import consider, leave_out

_AT_ONCE_S = 1.0
"""What a first check of the recipe, or a trial of it, may cost beyond the budget."""


def take_over(state: SearchState, choices: Choices) -> Decisions:
    """Switch a replayed plan on, strategy by strategy, each after the guard's check."""
    for name, setting in choices.items():
        candidate = state.candidates[name]
        if why := candidate.ruled_out[1] if candidate.ruled_out else candidate.refusal():
            verdicts.decide(state, candidate, "not applicable", why)
            continue
        candidate.row.setting = candidate.describe(setting)
        if (yield from check(state, candidate, {**state.plan, name: setting})):
            state.plan = {**state.plan, name: setting}
            verdicts.decide(state, candidate, "kept", "taken over from the plan, without a trial")


def recall(state: SearchState) -> Decisions:
    """Try what an earlier run has found, as a whole, or else the recipe; unless it is shown to be faster, it is undone.

    What has a trial of its own kind is tried by that: before the rest, or in its turn.
    """
    memory = state.recollection
    memory.recall()
    plan = memory.choices(state.candidates)
    if memory.text:
        state.note(f"remembered {memory.text}")
        state.say(f"remembered {memory.text}")
    yield from _try_what_comes_first(state, plan)
    whole = {name: setting for name, setting in plan.items() if not state.candidates[name].comparison.order}
    if suggested := _affordable_part(state, whole):
        memory.begin_check([name for name in whole if name not in suggested])
        yield from _check_suggested(state, suggested, memory)
    elif not plan:
        yield from _begin_recipe(state)


def _try_what_comes_first(state: SearchState, plan: Choices) -> Decisions:
    for candidate in [state.candidates[name] for name in plan]:
        candidate.row.setting = candidate.describe(plan[candidate.name])
        if candidate.comparison.order < 0 and not has_news(state):  # that can't wait for so long a trial
            yield from consider(state, candidate, is_paid_for=True)


def _affordable_part(state: SearchState, plan: Choices) -> Choices:
    """Return the part of a plan whose one-off work the budget allows for, if this run is as long as the last one."""
    memory, in_all_s = state.recollection, 0.0
    is_affordable = costs.affordable_in(state, memory.run_s, memory.saved_s)
    one_off_s = {name: costs.work_of(state, state.candidates[name], setting) for name, setting in plan.items()}
    waiting = set()
    for name in sorted(plan, key=one_off_s.__getitem__):
        in_all_s += one_off_s[name]
        if one_off_s[name] >= costs.DEAR_S and not is_affordable(in_all_s):
            waiting.add(name)
    return {name: setting for name, setting in plan.items() if name not in waiting}


# -- the recipe --------------------------------------------------------------------------------------------------------


def _begin_recipe(state: SearchState) -> Decisions:
    """Try the recipe at once, if a check of it is no dearer than a second; else what of it is free.

    At this time the share of the run that the search may cost is next to nothing.
    """
    first = state.recipe.choices(state, free=True)
    yield from _try_what_comes_first(state, {name: None for name in first})
    plan = _without_waiting(state, state.recipe.choices(state))
    # A stale input shows in a second step only; where that is too dear now, it is compared once the plan is on.
    for steps, part in ((state.pace.guard, plan), (1, plan), (1, {name: plan[name] for name in first if name in plan})):
        expected_s = costs.check_of(state, part, steps)
        at_once = expected_s <= _AT_ONCE_S and not state.budget.exhausted(state.cost_s, expected_s)
        if part and (at_once or costs.affordable(state, expected_s)):
            yield from follow_recipe(state, part, steps)
            return


def affordable_recipe(state: SearchState) -> Choices:
    """Return what of the recipe is to be tried as a whole now, if it is more than one and the budget allows for it."""
    plan = _without_waiting(state, state.recipe.choices(state))
    return plan if len(plan) > 1 and costs.affordable(state, costs.check_of(state, plan)) else {}


def _without_waiting(state: SearchState, plan: Choices) -> Choices:
    """Return the part of the recipe that can be tried as a whole: the rest has a trial of its own, or waits."""
    able, in_all_s = {}, 0.0
    for name, setting in plan.items():
        candidate = state.candidates[name]
        work_s = costs.work_of(state, candidate, setting)
        if candidate.comparison.order or priority.too_little(state, candidate) or candidate.at_length:
            continue
        if not costs.can_do_at_once(state, candidate, setting, in_all_s):
            continue
        if work_s >= costs.DEAR_S and priority.waits_in_loop(state, candidate):
            continue
        in_all_s += work_s
        able[name] = setting
    return able


def follow_recipe(state: SearchState, plan: Choices, steps: int | None = None) -> Decisions:
    """Try a part of the recipe as a whole; once it is kept, leave each member out in turn where that is cheap.

    Args:
        steps: in which the guard compares it at first, if not as many as usual.
    """
    recipe = state.recipe
    state.note(f"the recipe is tried as a whole: {', '.join(plan)}")
    recipe.begin_check(plan)
    yield from _check_suggested(state, plan, recipe, steps)
    kept = [name for name in plan if name in state.plan]
    if kept and steps is not None and steps < state.pace.guard:
        problem = yield from check_whole(state, dict(state.plan), steps)
        for name in kept if problem else ():
            verdicts.remove(state, name, problem)
    for name in kept:
        candidate = state.candidates[name]
        is_cheap = not costs.is_dear(candidate) and costs.made_for_calls(state, candidate) is None
        if len(plan) > 1 and name in state.plan and is_cheap:
            yield from leave_out(state, candidate)


# -- checks ------------------------------------------------------------------------------------------------------------


def _check_suggested(
    state: SearchState, plan: Choices, source: RememberedPlan | Recipe, steps: int | None = None
) -> Decisions:
    standing, kept, cost_s = state.standing_plan(), dict(state.plan), state.cost_s
    only = state.candidates[next(iter(plan))] if len(plan) == 1 else None
    beside = {name: setting for name, setting in kept.items() if name not in standing}  # whose trial was its own
    with charged_to(state, only):
        problem = yield from check_whole(state, {**beside, **plan}, steps)
    dear = [state.candidates[name] for name in plan if costs.is_dear(state.candidates[name])]
    if len(dear) == 1:
        costs.note_work(state, dear[0], plan[dear[0].name], state.cost_s - cost_s)
    if problem:
        source.reject(problem)
        return
    for name in plan:
        state.candidates[name].stage = CandidateStage.DECIDED
        state.recollection.tried.add(name)
    state.plan = {**standing, **kept, **plan}
    if isinstance(source, Recipe):  # nobody has seen it on in such a run: it may be much slower
        limit_s = partial(costs.trial_limit_s, state)
        yield from close(state, source.what, if_much_slower="drop", limit_s=limit_s)
    else:
        yield from look(state)
        yield from close(state, source.what)
    missing = [state.candidates[name] for name in plan if name not in state.plan]
    if not missing:
        _confirm(state, plan, source)
        return
    left = [name for name in plan if name in state.plan]
    faster = f"only {', '.join(left)} was" if left else "it was not"
    source.reject(f"{faster} shown to be faster than plain")
    for candidate in missing:
        if not candidate.has_failed():  # the search is to try it, whatever has been decided so far
            candidate.withdraw()
            candidate.stage = CandidateStage.QUEUED
    state.closing, state.closed_plan = None, {}


def _confirm(state: SearchState, plan: Choices, source: RememberedPlan | Recipe) -> None:
    """Record that the closing trial has shown a suggested plan to be faster."""
    source.confirm()
    for name in plan:
        candidate = state.candidates[name]
        if state.closing is not None and list(state.plan) == [name]:
            verdicts.judge(state, candidate, plan[name], TrialResult(state.closing))
        candidate.row.setting = candidate.row.setting or candidate.describe(plan[name])
        why = verdicts.with_draws(candidate, source.reason())
        verdicts.decide(state, candidate, "kept", why)
    verdicts.remember(state)
