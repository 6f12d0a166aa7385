"""The closing trial: the whole plan against the plain loop."""

from __future__ import annotations

import functools

from accel.profiler.trial import Outcome
from accel.profiler.trial_driver import together
from accel.search import priority, verdicts
from accel.search.experiment import Decisions, charged_to, look, trial
from accel.search.plan import Choices
from accel.search.state import SearchState
from accel.strategies.trial_design import TrialDesign

_PAIRS = 6
"""Pairs of blocks that a closing trial has at the least, and so a trial that stands for it."""


def close(state: SearchState, what: str = "the plan as a whole") -> Decisions:
    """Try the whole plan against the plain loop, and undo what is shown not to be faster.

    Each strategy of it has had its own trial, in this run or an earlier one. So where noise leaves this one open, and
    the plan looks faster, it stays.

    Args:
        state: of the search.
        what: the plan, in the reason for undoing it.
    """
    while state.plan:
        plan, standing = dict(state.plan), state.standing_plan()
        outcome = _known_outcome(state, plan, standing)
        if outcome is None and plan != standing:
            settle = max(state.candidates[name].comparison.settling(setting) for name, setting in plan.items())
            with charged_to(state):
                result = yield from trial(state, TrialDesign(), standing, plan, settle=settle)
            if result is None:
                continue  # a strategy tripped and is gone: close with the rest
            outcome = result.outcome
        # What stands has been measured by itself: the rest of the plan was tried on top of it.
        own = [state.candidates[name].standing for name in standing]
        outcomes = [each for each in (*own, outcome) if each is not None]
        state.closing, state.closed_plan = functools.reduce(together, outcomes), plan
        if outcome is None or outcome.verdict == "keep" or (outcome.verdict == "refused" and outcome.gain > 1):
            yield from look(state)
            return
        for name in priority.first_undone(state, plan):
            why = f"{what} was not shown to be faster than plain in the closing trial"
            verdicts.remove(state, name, why, is_slower=True)


def _known_outcome(state: SearchState, plan: Choices, standing: Choices) -> Outcome | None:
    """Return the outcome of a plan against the plain loop, if the very last trial was of just that.

    Only the last one counts: of several candidates, the luckiest would be kept without a second trial.
    """
    last = state.last_trial
    if last is None or last[:2] != (standing, plan):
        return None
    return last[2] if last[2].verdict == "keep" and last[2].pairs >= _PAIRS else None
