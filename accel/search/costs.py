"""What trying a candidate will cost about, and whether the run can afford it.

One-off work costs what the strategy declares, until it has been measured, in this run or an earlier one; a comparison
by the guard some replays of the step, until one of its kind has been made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from accel.profiler.interruptions import ours
from accel.search.budget import TO_WIN

if TYPE_CHECKING:
    from accel.search.actions import Result
    from accel.search.plan import Choices
    from accel.search.state import Candidate, SearchState

DEAR_S = 1.0
"""One-off work that takes so long comes after what is cheap, is not done beside other processes, and is measured."""
ONE_OFF = "one-off work"
COMPARING = "comparing it with the plain loop"
_REPLAYS = {"model": 3.0, "optimizer": 0.5, "input": 0.0}
"""Steps that a comparison in one step takes about, by what is compared: replays of the step, two updates of a copy,
nothing."""
_OVERSPENT = 0.01
"""Share of the run so far that a trial may cost where less than that is left of the budget."""
_MARGIN = 1.1
"""The run may have become faster since the plain step was measured."""


def declared_s(candidate: Candidate, setting: Any = None) -> float:
    """Return the seconds of one-off work that a strategy itself expects of a setting."""
    try:
        return candidate.design.cost_of(setting)
    except ours():  # a model whose modules can't be looked into; its refusal will say so
        return 0.0


def is_dear(candidate: Candidate) -> bool:
    """Tell whether one-off work takes seconds."""
    cost_s = candidate.design.cost_s
    return not candidate.is_insisted and (callable(cost_s) or cost_s >= DEAR_S)


def least_trial_s(state: SearchState) -> float:
    """Return the seconds that a trial takes at the least, with steps as they are now."""
    config = (state.config.brief() or state.config).for_steps_of(state.step_s)
    return 2 * config.looks[0] * config.block_steps * state.step_s


def work_s(state: SearchState, candidate: Candidate) -> float:
    """Return the seconds of one-off work to expect of the setting that is tried next."""
    return work_of(state, candidate, _next_setting(candidate))


def work_of(state: SearchState, candidate: Candidate, setting: Any) -> float:
    """Return the same of a setting: what is done already, or does not wait for the budget, costs nothing more."""
    other = made_for_calls(state, candidate)
    again_s = 0.0
    if other is not None and candidate.passed != {**state.plan, candidate.name: setting}:  # else it has been made
        again_s = _once_s(state, other, state.plan[other.name])
    if candidate.is_insisted or _work(candidate, setting) in candidate.done:
        return again_s
    return again_s + _once_s(state, candidate, setting)


def made_for_calls(state: SearchState, candidate: Candidate) -> Candidate | None:
    """Return what of the plan has to be made once more, at its cost, if a candidate is switched on or off.

    A compiled graph is for one layout, one precision and one number of threads. What touches no call, or is made for
    calls itself, changes none of these.
    """
    if candidate.design.is_made_for_calls or "model" not in candidate.strategy.touches:
        return None
    others = (state.candidates[name] for name in state.plan)
    made = (other for other in others if other.design.is_made_for_calls)
    return next((other for other in made if declared_s(other, state.plan[other.name]) >= DEAR_S), None)


def _once_s(state: SearchState, candidate: Candidate, setting: Any) -> float:
    declared = declared_s(candidate, setting)
    return state.recollection.cost_s.get(_work(candidate, setting), declared) if declared else 0.0


def note_work(state: SearchState, candidate: Candidate, setting: Any, seconds: float) -> None:
    """Note that one-off work has been done, and what it has taken, if it is dear."""
    work, expected_s = _work(candidate, setting), work_of(state, candidate, setting)
    if is_dear(candidate) and work not in candidate.done:
        state.recollection.cost_s[work] = seconds
        if expected_s:
            state.note(f"{work}: one-off work took {seconds:.1f} s, expected {expected_s:.1f} s")
    candidate.done.add(work)


def check_s(state: SearchState, candidate: Candidate) -> float:
    """Return what the guard's comparison of a candidate will take about."""
    if not candidate.is_compared:
        return 0.0
    compared = _compared(candidate)
    return state.check_s.get(compared, _REPLAYS[compared] * state.pace.guard * state.plain_s)


def check_of(state: SearchState, plan: Choices, steps: int | None = None) -> float:
    """Return what the guard's comparison of a plan as a whole will take about, one-off work included.

    Args:
        steps: in which it is compared, if not as many as usual.
    """
    candidates = [state.candidates[name] for name in plan]
    work_s = sum(work_of(state, candidate, plan[candidate.name]) for candidate in candidates)
    compared_s = max((check_s(state, candidate) for candidate in candidates), default=0.0)
    return work_s + compared_s * (1.0 if steps is None else steps / state.pace.guard)


def note_check(state: SearchState, candidate: Candidate, result: Result, cost_s: float) -> None:
    """Let the next comparison of the same kind be expected to take as long as this one.

    The first step of a comparison has work in it that is done once: cuDNN plans its algorithms and times them, graphs
    are captured, libraries are loaded. So its last one counts, as often as there are steps.
    """
    comparison = candidate.design
    if comparison.cost_s or comparison.watch is not None or made_for_calls(state, candidate) is not None:
        return  # that may be mostly one-off work, or has fewer steps
    took_s = result.finding.seconds if result.finding is not None else 0.0
    state.check_s[_compared(candidate)] = state.pace.guard * took_s if took_s else cost_s


def expected_s(state: SearchState, candidate: Candidate) -> float:
    """Return what trying a candidate will cost at the least, s."""
    return max(work_s(state, candidate) + check_s(state, candidate), candidate.needs_s)


def affordable(state: SearchState, seconds: float, *, to_win: float = TO_WIN) -> bool:
    """Return whether the budget allows for a further cost now; `to_win` is as in `Budget.allows`."""
    return state.budget.allows(
        spent=state.cost_s,
        expected=seconds,
        elapsed=state.lasted_s,
        saved=_to_save_s(state, seconds),
        to_come=state.to_come_s,
        to_win=to_win,
    )


def can_pay(state: SearchState, candidate: Candidate, seconds: float) -> bool:
    """Return whether the budget allows for a cost of a candidate: half of its recorded gain may be spent on it."""
    return affordable(state, seconds, to_win=max(TO_WIN, (1 - 1 / state.recipe.gain(candidate.name)) / 2))


def can_do_at_once(state: SearchState, candidate: Candidate, setting: Any, before_s: float = 0.0) -> bool:
    """Return whether one-off work need not wait: the budget allows for it, or it is a small part of the run so far.

    Args:
        before_s: other such work that is done with it.
    """
    once_s = work_of(state, candidate, setting)
    return once_s <= min(DEAR_S, TO_WIN * state.lasted_s) or can_pay(state, candidate, before_s + once_s)


def _to_save_s(state: SearchState, lost_s: float = 0.0) -> float:
    """Return what the plan has saved, and will as far as it is known how long the run goes on, s.

    Args:
        lost_s: of the time that is to come; a run may be one of so many seconds.
    """
    return state.saved_s + max(0.0, (state.to_come_s or 0.0) - lost_s) * (state.shown_gain(state.plan) - 1)


def too_dear(state: SearchState, candidate: Candidate) -> str:
    """Say that a candidate costs more than the budget allows now; '' if it doesn't."""
    seconds = expected_s(state, candidate)
    if can_pay(state, candidate, seconds):
        return ""
    one_off_s = work_s(state, candidate)
    work = ONE_OFF if one_off_s else COMPARING
    return state.budget.too_dear(state.cost_s, one_off_s or seconds, work, never=state.to_come_s is not None)


def trial_limit_s(state: SearchState) -> float:
    """Return what a trial may cost before it is cut short: doubled, that is what its next one must wait for."""
    in_all_s = state.budget.in_all(elapsed=state.lasted_s + (state.to_come_s or 0.0), saved=_to_save_s(state))
    left_s = in_all_s - state.cost_s
    return max(left_s, _OVERSPENT * state.lasted_s)


def steps_until_affordable(state: SearchState, candidates: Iterable[Candidate]) -> float:
    """Return after how many steps the first of these will be affordable; infinite if none waits for that."""
    waiting = [each for each in candidates if not state.recollection.postponed(each.name, state.elapsed_s)]
    seconds = [s for other in waiting if not can_pay(state, other, s := expected_s(state, other))]
    if not seconds or state.plain_ms <= 0 or state.to_come_s is not None:
        return math.inf  # what does not pay in the rest of a run never will
    from_s = state.budget.allowed_from(spent=state.cost_s, expected=min(seconds), saved=state.saved_s)
    return _MARGIN * max(0.0, from_s - state.lasted_s) / state.step_s + 1


def _next_setting(candidate: Candidate) -> Any:
    """Return the setting whose one-off work comes next; None where all settings share it."""
    if not callable(candidate.design.cost_s):
        return None
    try:
        return next(iter(candidate.settings()), None)
    except ours():
        return None


def _work(candidate: Candidate, setting: Any) -> str:
    """Return what names a piece of one-off work: the strategy, with the setting if each has work of its own."""
    described = candidate.describe(setting) if callable(candidate.design.cost_s) else ""
    return f"{candidate.name} {described}".strip()


def _compared(candidate: Candidate) -> str:
    return max(candidate.strategy.touches & _REPLAYS.keys(), key=_REPLAYS.__getitem__)
