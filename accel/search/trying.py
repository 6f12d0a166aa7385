"""What is tried: one candidate, each of its settings against the plan so far, or a plan from outside as a whole.

Such a plan is one that is replayed, what an earlier run has found, or the recipe of the records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from accel.profiler.trial import TrialConfig, Verdict
from accel.profiler.trial_driver import TrialResult
from accel.search import costs, priority, verdicts
from accel.search.actions import Action, Decisions, Result
from accel.search.experiment import act, charged_to, check, check_whole, close, has_news, look, trial
from accel.search.plan import Choices, without
from accel.search.recipes import Recipe
from accel.search.remembered import RememberedPlan
from accel.search.state import Candidate, CandidateStage, SearchState

_SOON_STEADY = 2
"""What needs more settling steps may need a few more the first time: its first steps say little."""
_AT_ONCE_S = 1.0
"""What a first check of the recipe, or a trial of it, may cost beyond the budget."""


def consider(state: SearchState, candidate: Candidate, *, is_paid_for: bool = False) -> Decisions:
    """Try a candidate whose turn has come, or say why not.

    Args:
        is_paid_for: it does not wait for the budget.
    """
    candidate.refused = candidate.refusal()
    if why := candidate.refused:
        verdicts.give_up(state, candidate, "not applicable", why)
    elif why := priority.too_little(state, candidate):
        verdicts.give_up(state, candidate, "not tried", why)
    elif why := "" if is_paid_for else priority.why_pending(state, candidate):
        if impossible := candidate.refusal():  # as has turned out only now
            verdicts.give_up(state, candidate, "not applicable", impossible)
            return
        candidate.stage = CandidateStage.WAITING
        if candidate.row.status == "not tried":  # else the verdict on its other settings stands
            verdicts.decide(state, candidate, "not tried", why)
    else:
        yield from _try_in_turn(state, candidate)


def _try_in_turn(state: SearchState, candidate: Candidate) -> Decisions:
    """Try a candidate in brief, and at length once all others have been tried: noise must not hold them up."""
    # What has a place of its own can't be put off: comparisons with others would spoil its trial.
    brief = None if candidate.design.order or candidate.at_length else state.config.brief()
    config = brief or (state.config.at_length() if candidate.at_length else state.config)
    yield from try_settings(state, candidate, config, is_limited=True)
    if candidate.has_failed():
        return
    is_left = candidate.settings_left is not None
    is_open = brief is not None and not is_left and verdicts.is_open(state, candidate)
    if is_open or is_left:
        # It will be asked again whether it applies. A trial may have ended with it on, and then it can't tell.
        yield from act(state, Action(plan=state.plan, steps=1))
        if candidate.has_failed():
            return
    if is_open:
        candidate.withdraw()
        candidate.at_length, candidate.stage = True, CandidateStage.QUEUED
    elif is_left:
        candidate.stage = CandidateStage.WAITING
        if not has_news(state):  # else its trial was left for that
            verdicts.conclude(state, candidate)
    else:
        candidate.stage = CandidateStage.DECIDED
        verdicts.conclude(state, candidate)


def try_settings(
    state: SearchState, candidate: Candidate, config: TrialConfig, *, is_limited: bool = False
) -> Decisions:
    """Try each setting of a candidate against the plan so far; a setting that wins becomes part of the plan.

    Args:
        config: the statistics of its trials.
        is_limited: a trial is cut short, and its setting left for later, once it has cost what is left of the budget.
    """
    settings = candidate.settings()
    candidate.settings_left = None
    state.recollection.tried.add(candidate.name)
    for number, setting in enumerate(settings):
        if number and _has_to_wait(state, candidate, setting):
            candidate.settings_left = settings[number:]  # the verdict so far stands
            return
        candidate.row.setting = candidate.row.setting or candidate.describe(setting)
        with charged_to(state, candidate):
            trial_plan, result = yield from _try_setting(state, candidate, setting, config, is_limited)
        if result is None:
            return  # wrong or failed, which is recorded
        if result.cut_short:
            candidate.settings_left = settings[number:] if number else settings  # a list that may still grow
            _put_off(state, candidate, result)
            return
        if result.outcome is None:
            verdicts.give_up(state, candidate, "not tried", result.why)
            return
        if result.outcome.verdict == "keep":
            state.plan = trial_plan
            candidate.standing = result.outcome if candidate.design.stands else None
        verdicts.judge(state, candidate, setting, result)
        if result.outcome.verdict == "keep":
            yield from look(state)


def _try_setting(
    state: SearchState, candidate: Candidate, setting: Any, config: TrialConfig, is_limited: bool
) -> Generator[Action, Result, tuple[Choices, TrialResult | None]]:
    """Return the plan with a setting, and what its check and its trial have shown; None if it is wrong or fails."""
    cost_s = state.cost_s
    trial_plan, has_passed = yield from _check(state, candidate, setting)
    if candidate.is_compared:
        costs.note_work(state, candidate, setting, state.cost_s - cost_s)
    if not has_passed:
        return trial_plan, None
    candidate.passed = trial_plan
    # Two trials that show it end in a drop.
    if_much_slower: Verdict | None = "inconclusive" if config == state.config.brief() else None
    if candidate.at_length:
        if_much_slower = "drop"
    is_soon_steady = candidate.design.settling(setting) <= _SOON_STEADY
    result = yield from trial(
        state,
        state.plan,
        trial_plan,
        design=candidate.design,
        config=config,
        if_much_slower=if_much_slower if is_soon_steady else None,
        limit_s=_limit(state) if is_limited else lambda: math.inf,
    )
    if not candidate.is_compared:  # then it works when it is switched on
        costs.note_work(state, candidate, setting, state.cost_s - cost_s)
    return trial_plan, result


def _check(state: SearchState, candidate: Candidate, setting: Any) -> Generator[Action, Result, tuple[Choices, bool]]:
    """Return the plan so far with a setting, and whether the guard passes it.

    In the guard's steps a strategy of the plan may trip: then it is the plan without that one that is looked at.
    """
    while True:
        trial_plan = {**state.plan, candidate.name: setting}
        has_passed = candidate.passed == trial_plan or (yield from check(state, candidate, trial_plan))
        if not has_passed or trial_plan == {**state.plan, candidate.name: setting}:
            return trial_plan, has_passed


def _has_to_wait(state: SearchState, candidate: Candidate, setting: Any) -> bool:
    """Tell whether a further setting has to wait for the budget, or for the loop if it has work of its own."""
    work_s = costs.work_of(state, candidate, setting)
    if not costs.can_pay(state, candidate, work_s + costs.check_s(state, candidate)):
        return True
    return bool(work_s and costs.declared_s(candidate, setting) and candidate.waits())


def _limit(state: SearchState) -> Callable[[], float]:
    """Return what a trial may cost: nothing from when other processes have come or left, which goes first."""
    limit_s = costs.trial_limit_s(state)
    return lambda: -math.inf if has_news(state) else limit_s


def _put_off(state: SearchState, candidate: Candidate, result: TrialResult) -> None:
    why = "other processes came or left in its trial; tried later"
    if not has_news(state):
        candidate.needs_s = 2 * result.cost_s
        why = state.budget.too_dear(state.cost_s, candidate.needs_s, costs.COMPARING)
    if candidate.row.status == "not tried":
        candidate.row.why = why


def leave_out(state: SearchState, candidate: Candidate) -> Decisions:
    """Try the plan without a strategy that was not tried by itself: the gain of it is known then, and it may go.

    Steps without it that are much slower end the trial at once.
    """
    name, plan, config = candidate.name, dict(state.plan), state.config.of_kept()
    with charged_to(state, candidate):
        result = yield from trial(
            state,
            plan,
            without(state.plan, name),
            config=config.brief() or config,
            if_much_slower="drop",
            limit_s=partial(costs.trial_limit_s, state),
        )
    if result is None or result.outcome is None or name not in state.plan:
        return
    verdicts.judge_left_out(candidate, result.outcome)
    if result.outcome.verdict == "keep":
        verdicts.remove(state, name, "the plan is faster without it", is_slower=True)
        yield from look(state)


# -- plans from outside ------------------------------------------------------------------------------------------------


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
    """Try what an earlier run has found as a whole, or else the recipe; undo what is not shown to be faster.

    What has a trial of its own kind is tried by that: before the rest, or in its turn.
    """
    memory = state.recollection
    memory.recall()
    plan = memory.choices(state.candidates)
    if memory.text:
        state.note(f"remembered {memory.text}")
        state.say(f"remembered {memory.text}")
    yield from _try_what_comes_first(state, plan)
    whole = {name: setting for name, setting in plan.items() if not state.candidates[name].design.order}
    if suggested := _affordable_part(state, whole):
        memory.begin_check([name for name in whole if name not in suggested])
        yield from _check_suggested(state, suggested, memory)
    elif not plan:
        yield from _begin_recipe(state)


def _try_what_comes_first(state: SearchState, plan: Choices) -> Decisions:
    for candidate in [state.candidates[name] for name in plan]:
        candidate.row.setting = candidate.describe(plan[candidate.name])
        if candidate.design.order < 0 and not has_news(state):  # that can't wait for so long a trial
            yield from consider(state, candidate, is_paid_for=True)


def _affordable_part(state: SearchState, plan: Choices) -> Choices:
    """Return the part of a plan whose one-off work the budget allows for, if this run is as long as the last one."""
    memory, in_all_s = state.recollection, 0.0
    elapsed_s = max(state.elapsed_s, memory.run_s, state.lasted_s + (state.to_come_s or 0.0))
    one_off_s = {name: costs.work_of(state, state.candidates[name], setting) for name, setting in plan.items()}
    waiting = set()
    for name in sorted(plan, key=one_off_s.__getitem__):
        in_all_s += one_off_s[name]
        known = {"spent": state.cost_s, "expected": in_all_s, "elapsed": elapsed_s, "saved": memory.saved_s}
        if one_off_s[name] >= costs.DEAR_S and not state.budget.allows(**known):
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
        if candidate.design.order or priority.too_little(state, candidate) or candidate.at_length:
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
    source.confirm()
    for name in plan:
        candidate = state.candidates[name]
        if state.closing is not None and list(state.plan) == [name]:
            verdicts.judge(state, candidate, plan[name], TrialResult(state.closing))
        candidate.row.setting = candidate.row.setting or candidate.describe(plan[name])
        why = verdicts.with_draws(candidate, source.reason())
        verdicts.decide(state, candidate, "kept", why)
    verdicts.remember(state)
