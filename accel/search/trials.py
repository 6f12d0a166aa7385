"""Interleaved trials on real steps: the blocks of both plans in turn, and what they cost the run.

What is much slower shows in its first two steps, on a GPU in its first block, which then end the trial.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import NamedTuple

from accel.profiler.trial import Outcome, Trial, TrialConfig, Verdict
from accel.search.actions import Action, Result
from accel.search.plan import Choices

_FIRST = 2
"""Steps of B that can end a trial."""
_MUCH_SLOWER = 1.25
"""They do so if each took this many times as long as the slowest of A's. Noise of 10 % does that once in 10,000. Of a
whole block it is the level."""

_SURER = 1.47
"""Half-widths of a 95 % interval that make one of 99.6 %, whose ends are as sure as a keep."""
_LONGEST_SETTLING, _LONGEST_SETTLING_S = 10.0, 1.0
"""What a settling step can take by its own doing: so many ordinary steps, or so many seconds where that is more."""


class TrialResult(NamedTuple):
    """What a trial found, and what it cost."""

    outcome: Outcome
    cost_s: float
    """Steps of B that were slower than those of A. Faster ones are a gain, and reduce no cost."""
    cut_short: bool = False
    """It had cost as much as it may before there was a verdict."""


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
    if_much_slower: Verdict | None = None,
    limit_s: Callable[[], float] = lambda: math.inf,
) -> Generator[Action, Result, TrialResult | None]:
    """Run one trial in blocks of steps; None if it was interrupted.

    Args:
        act: runs an action.
        a: the plan of the A blocks.
        b: the plan of the B blocks.
        settle: steps to leave out after each switch, at least.
        config: the statistics of the trial.
        reduce: how a block of step times becomes one number.
        if_much_slower: the verdict where B's first steps are much slower than A's; None tries it to the end.
        limit_s: the trial is cut short once it has made the run longer by more than this; asked after each block of B.
    """
    trial = Trial(config, reduce=reduce)
    settle = in_phase(settle, config.block_steps)
    last, is_drained = None, False
    settling = 0.0
    while trial.verdict is None:
        arm = trial.arm
        plan = a if arm == "A" else b
        is_first = arm == "B" and bool(trial.steps["A"]) and not trial.steps["B"]
        looks_early = is_first and if_much_slower and config.block_steps >= _FIRST
        steps = _FIRST if looks_early and not is_drained else config.block_steps
        result = yield from act(Action(plan=plan, steps=steps, settle=0 if arm == last else settle))
        if result is None:
            return None
        last, seconds, is_drained = arm, result.seconds, result.drained
        settling += settling_cost(result.settling, reduce(seconds))
        if looks_early:
            plain = trial.steps["A"]
            if if_much_slower and _is_much_slower(plain, seconds, reduce if is_drained else None):
                cost_s = max(0.0, settling) + len(seconds) * (reduce(seconds) - reduce(plain))
                return TrialResult(_outcome(plain, seconds, if_much_slower, reduce), cost_s)
            if config.block_steps > len(seconds):
                result = yield from act(Action(plan=plan, steps=config.block_steps - len(seconds)))
                if result is None:
                    return None
                seconds = seconds + result.seconds
        trial.record(seconds)
        is_judged = arm == "B" and trial.steps["A"] and trial.verdict is None
        if is_judged and settling + _slower_s(trial, reduce) > limit_s():
            cost_s = max(0.0, settling) + max(0.0, _slower_s(trial, reduce))
            outcome = _outcome(trial.steps["A"], trial.steps["B"], "refused", reduce)
            return TrialResult(outcome, cost_s, cut_short=True)
    return TrialResult(trial.outcome(), max(0.0, settling) + max(0.0, _slower_s(trial, reduce)))


def in_phase(settle: int, block_steps: int) -> int:
    """Return after how many settling steps, at least `settle`, the blocks of a pair begin with a step of the same kind.

    Where every second step is of another kind, as where a generator is updated in turns, an odd block has more of one:
    the median of five steps is of the kind of three.
    """
    return settle + 1 if block_steps % 2 and not settle % 2 else settle


def _is_much_slower(
    plain: Sequence[float], slower: Sequence[float], reduce: Callable[[Sequence[float]], float] | None
) -> bool:
    """Tell whether B's first steps are much slower than A's, by all of them.

    Args:
        plain: seconds of A's.
        slower: seconds of B's.
        reduce: the level of a whole block; None where it is two steps. The median must agree: one stall moves a mean.
    """
    if reduce is None:
        return min(slower) > _MUCH_SLOWER * max(plain)
    return all(level(slower) > _MUCH_SLOWER * level(plain) for level in (reduce, statistics.median))


def _slower_s(trial: Trial, reduce: Callable[[Sequence[float]], float]) -> float:
    """Return by how many seconds B's steps have been slower than A's, less than 0 if they were faster."""
    return len(trial.steps["B"]) * (reduce(trial.steps["B"]) - reduce(trial.steps["A"]))


def settling_cost(settling: Sequence[float], step_s: float) -> float:
    """Return what settling steps cost: they are real steps, so only their time above an ordinary one.

    The first after a device was drained is one of them: with no work before it, nothing hides its fetch.

    A stall of seconds is another process's, not the candidate's.
    """
    longest_s = max(_LONGEST_SETTLING * step_s, _LONGEST_SETTLING_S)
    return sum(min(seconds, longest_s) - step_s for seconds in settling)


def _outcome(
    plain: Sequence[float], slower: Sequence[float], verdict: Verdict, reduce: Callable[[Sequence[float]], float]
) -> Outcome:
    """Return the outcome of a trial that was ended early; the interval is that of single steps."""
    before_s, after_s = reduce(plain), reduce(slower)
    return Outcome(
        verdict=verdict,
        gain=before_s / after_s,
        low=min(plain) / max(slower),
        high=max(plain) / min(slower),
        before_ms=before_s * 1e3,
        after_ms=after_s * 1e3,
        spread_ms=(max(slower) - min(slower)) / 2 * 1e3,
        pairs=1,
    )


def together(first: Outcome, second: Outcome) -> Outcome:
    """Return the outcome of both gains, the second measured on top of the first, each with an error of its own."""
    gain = first.gain * second.gain
    below = math.hypot(*(math.log(each.gain / each.low) for each in (first, second)))
    above = math.hypot(*(math.log(each.high / each.gain) for each in (first, second)))
    return replace(
        second,
        gain=gain,
        low=gain * math.exp(-below),
        high=gain * math.exp(above),
        before_ms=second.before_ms * first.gain,
    )


def pooled(outcome: Outcome, gain: float, low: float) -> tuple[float, float] | None:
    """Return what this trial and an earlier one show together: the gain, and the lower end of its 95 % interval.

    The mean of both logarithms, each weighted by the inverse of its variance, as a meta-analysis pools studies of one
    effect. None where they are not of one effect: their intervals don't meet, or the earlier one has shown no gain.

    Args:
        outcome: of this run's trial.
        gain: of the earlier one, as a ratio.
        low: lower end of its 95 % interval.
    """
    if not 1.0 < low <= gain or not 0.0 < outcome.low <= outcome.gain <= outcome.high < math.inf:
        return None
    if outcome.high < low or outcome.low > gain * gain / low:
        return None
    logs = math.log(gain), math.log(outcome.gain)
    errors = max(logs[0] - math.log(low), 1e-3), max(math.log(outcome.high / outcome.low) / 2, 1e-3)
    weights = [error**-2 for error in errors]
    mean = sum(weight * each for weight, each in zip(weights, logs, strict=True)) / sum(weights)
    return math.exp(mean), math.exp(mean - sum(weights) ** -0.5)


def shows_a_gain(outcome: Outcome, gain: float, low: float, at_least: float) -> bool:
    """Tell whether a trial and an earlier one, both left open by noise, together show a gain as surely as a keep does.

    Args:
        outcome: of this run's trial.
        gain: of the earlier one, as a ratio.
        low: lower end of its 95 % interval.
        at_least: gain above which something is kept, as a ratio - 1.
    """
    both = pooled(outcome, gain, low)
    if both is None:
        return False
    mean, half_width = math.log(both[0]), math.log(both[0] / both[1])
    return outcome.low > 1.0 and mean - _SURER * half_width > math.log1p(at_least)


def bears_out(outcome: Outcome, gain: float, low: float) -> bool:
    """Tell whether a trial that noise has left open shows no loss by itself, and a gain together with an earlier one.

    Args:
        outcome: of this run's trial.
        gain: of the earlier one, as a ratio.
        low: lower end of its 95 % interval.
    """
    both = pooled(outcome, gain, low)
    return outcome.gain >= 1.0 and both is not None and both[1] > 1.0


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
