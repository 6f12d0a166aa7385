"""Interleaved trials on real steps: the blocks of both plans in turn, and what they cost the run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from accel.profiler.trial import Outcome, Trial, TrialConfig
from accel.search.actions import Action, Result
from accel.search.plan import Choices


class TrialResult(NamedTuple):
    """What a trial found, and what it cost."""

    outcome: Outcome
    cost_s: float
    """Steps of B that were slower than those of A. Faster ones are a gain, and reduce no cost."""


Act = Callable[[Action], Generator[Action, Result, "Result | None"]]
"""Runs an action; returns None if its steps can't be compared: a strategy tripped, or the regime changed."""


def by_blocks(
    act: Act,
    a: Choices,
    b: Choices,
    *,
    settle: int,
    config: TrialConfig,
    reduce: Callable[[Sequence[float]], float],
) -> Generator[Action, Result, TrialResult | None]:
    """Run one trial in blocks of steps; None if it was interrupted.

    Args:
        act: runs an action.
        a: the plan of the A blocks.
        b: the plan of the B blocks.
        settle: steps to leave out after each switch.
        config: the statistics of the trial.
        reduce: how a block of step times becomes one number.
    """
    trial = Trial(config, reduce=reduce)
    last = None
    settling = 0.0
    while trial.verdict is None:
        arm = trial.arm
        plan = a if arm == "A" else b
        result = yield from act(Action(plan=plan, steps=config.block_steps, settle=0 if arm == last else settle))
        if result is None:
            return None
        last = arm
        # A settling step is a real step: only its time above an ordinary one is a cost.
        settling += sum(result.settling) - len(result.settling) * statistics.median(result.seconds)
        trial.record(result.seconds)
    slower = statistics.median(trial.steps["B"]) - statistics.median(trial.steps["A"])
    return TrialResult(trial.outcome(), max(0.0, settling) + max(0.0, len(trial.steps["B"]) * slower))


def by_epochs(
    act: Act, a: Choices, b: Choices, *, config: TrialConfig
) -> Generator[Action, Result, TrialResult | None]:
    """Run one trial whose blocks are epochs, each with its beginning: what counts is the mean step."""
    trial = Trial(config, reduce=statistics.fmean)
    took_s = {"A": 0.0, "B": 0.0}
    while trial.verdict is None:
        arm = trial.arm
        result = yield from act(Action(plan=a if arm == "A" else b, whole_epoch=True))
        if result is None:
            return None
        took_s[arm] += sum(result.seconds)
        trial.record([statistics.fmean(result.seconds)])
    return TrialResult(trial.outcome(), max(0.0, took_s["B"] - took_s["A"]))
