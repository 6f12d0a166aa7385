"""One candidate: whether it can be tried now, and its trial, each of its settings against the plan so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Any

from accel.profiler.trial import TrialConfig, Verdict
from accel.profiler.trial_driver import TrialResult
from accel.search import costs, priority, verdicts
from accel.search.actions import Action, Decisions, Result
from accel.search.experiment import act, charged_to, check, has_news, look, trial
from accel.search.plan import Choices
from accel.search.state import Candidate, CandidateStage, SearchState
from accel.strategies.trial_design import TrialDesign

_SOON_STEADY = 2
"""What needs more settling steps may need a few more the first time: its first steps say little."""


def consider(state: SearchState, candidate: Candidate, *, is_paid_for: bool = False) -> Decisions:
    """Try a candidate whose turn has come, or say why not.

    Args:
        is_paid_for: it does not wait for the budget.
    """
    if why := candidate.refusal():
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


def say_what_does_not_apply_anyway(state: SearchState) -> None:
    """Say of what the user's level leaves out that it does not apply, where that is so: naming it would not help."""
    for candidate in state.candidates.values():
        if candidate.row.status == "not allowed" and (why := candidate.refusal()):
            verdicts.decide(state, candidate, "not applicable", why)


def _try_in_turn(state: SearchState, candidate: Candidate) -> Decisions:
    """Try a candidate in brief, and at length once all others have been tried: noise must not hold them up."""
    # What has a place of its own can't be put off: comparisons with others would spoil its trial.
    brief = None if candidate.comparison.order or candidate.at_length else state.config.brief()
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
            verdicts.settle(state, candidate)
    else:
        candidate.stage = CandidateStage.DECIDED
        verdicts.settle(state, candidate)


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
            candidate.standing = result.outcome if candidate.comparison.stands else None
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
    settle = candidate.comparison.settling(setting)
    result = yield from trial(
        state,
        candidate.comparison,
        state.plan,
        trial_plan,
        settle=settle,
        config=config,
        if_much_slower=_if_much_slower(state, candidate, config) if settle <= _SOON_STEADY else None,
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
    """Say why a trial that was cut short is made later."""
    why = "other processes came or left in its trial; tried later"
    if not has_news(state):
        candidate.needs_s = 2 * result.cost_s
        why = state.budget.too_dear(state.cost_s, candidate.needs_s, costs.COMPARING)
    if candidate.row.status == "not tried":
        candidate.row.why = why


def _if_much_slower(state: SearchState, candidate: Candidate, config: TrialConfig) -> Verdict | None:
    """Return the verdict where the first steps are much slower: two such trials end in a drop."""
    if candidate.at_length:
        return "drop"
    return "inconclusive" if config == state.config.brief() else None


def leave_out(state: SearchState, candidate: Candidate) -> Decisions:
    """Try the plan without a strategy that was not tried by itself: the gain of it is known then, and it may go.

    Steps without it that are much slower end the trial at once.
    """
    name, plan = candidate.name, dict(state.plan)
    without: Choices = {n: setting for n, setting in plan.items() if n != name}
    config = state.config.of_kept()
    with charged_to(state, candidate):
        result = yield from trial(
            state,
            TrialDesign(),
            plan,
            without,
            settle=candidate.comparison.settling(plan[name]),
            config=config.brief() or config,
            if_much_slower="drop",
            limit_s=lambda: costs.trial_limit_s(state),
        )
    if result is None or result.outcome is None or name not in state.plan:
        return
    verdicts.judge_left_out(candidate, result.outcome)
    if result.outcome.verdict == "keep":
        verdicts.remove(state, name, "the plan is faster without it", is_slower=True)
        yield from look(state)
