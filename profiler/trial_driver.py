"""The one driver of trials: which blocks of steps are run, in what order, and what they show together.

A comparison is a generator. It yields the `Block` that is to run next, is sent the `Steps` that were measured in it,
and returns a `TrialResult`. It knows neither the loop nor what A and B are: whoever drives it switches between the two,
runs the steps and sends their times (`drive`, for a loop that is a generator itself). To give a trial up, drop it.

What is much slower shows in its first two steps, on a GPU in its first block, which then end the trial. The statistics
are those of `accel.profiler.trial`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from accel.profiler.trial import Arm, Outcome, Trial, TrialConfig, Verdict, at_gain, interval, log_ratios

_FIRST = 2
"""Steps of B that can end a trial."""
_MUCH_SLOWER = 1.25
"""They do so if each took this many times as long as the slowest of A's. Noise of 10 % does that once in 10,000. Of a
whole block it is the level."""
_LONGEST_SETTLING, _LONGEST_SETTLING_S = 10.0, 1.0
"""What a settling step can take by its own doing: so many ordinary steps, or so many seconds where that is more."""
_PARTS = 10
"""Parts into which the steps before a switch, and those after it, are cut."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Steps to run under one of the two plans."""

    arm: Arm
    steps: int = 0
    """Steps to count."""
    settle: int = 0
    """Steps to run first and leave out."""
    whole_epoch: bool = False
    """Count the steps of one epoch instead, from its first to its last."""


@dataclass(kw_only=True)
class Steps:
    """What was measured in a block."""

    seconds: Sequence[float]
    """Of each counted step."""
    settling: Sequence[float] = ()
    """Seconds of the steps that were left out."""
    drained: bool = False
    """The device was idle at the end of the block: to look at fewer steps than a block has would cost something."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Phase → seconds in all counted steps."""


class TrialResult(NamedTuple):
    """What a trial has found, and what it has cost."""

    outcome: Outcome | None
    """None where there was nothing to compare."""
    cost_s: float = 0.0
    """Steps of B that were slower than those of A. Faster ones are a gain, and reduce no cost."""
    cut_short: bool = False
    """It had cost as much as it may before there was a verdict."""
    why: str = ""
    """Words for the report, in place of the usual ones for the verdict."""


Comparing = Generator[Block, Steps, TrialResult]
Reduce = Callable[[Sequence[float]], float]
"""How a block of step times becomes one number."""

Y = TypeVar("Y")
S = TypeVar("S")


def drive(comparison: Comparing, run: Callable[[Block], Generator[Y, S, Steps]]) -> Generator[Y, S, TrialResult]:
    """Run a comparison in a loop that is a generator; `run` yields whatever that loop needs for a block."""
    block = next(comparison)
    while True:
        steps = yield from run(block)
        try:
            block = comparison.send(steps)
        except StopIteration as ended:
            result: TrialResult = ended.value
            return result


def by_blocks(
    config: TrialConfig,
    *,
    settle: int = 1,
    reduce: Reduce = statistics.median,
    if_much_slower: Verdict | None = None,
    limit_s: Callable[[], float] = lambda: math.inf,
) -> Comparing:
    """Compare in blocks of steps.

    Args:
        config: the statistics.
        settle: steps to leave out after each switch, at least.
        reduce: how a block of step times becomes one number.
        if_much_slower: the verdict where B's first steps are much slower than A's; None tries it to the end.
        limit_s: the trial is cut short once it has made the run longer by more than this; asked after each block of B.
    """
    trial = Trial(config, reduce=reduce)
    settle = in_phase(settle, config.block_steps)
    last: Arm | None = None
    is_drained, settling_s = False, 0.0
    while trial.verdict is None:
        arm = trial.arm
        is_first_of_b = arm == "B" and bool(trial.steps["A"]) and not trial.steps["B"]
        looks_early = is_first_of_b and if_much_slower is not None and config.block_steps >= _FIRST
        count = _FIRST if looks_early and not is_drained else config.block_steps
        steps = yield Block(arm=arm, steps=count, settle=0 if arm == last else settle)
        last, seconds, is_drained = arm, list(steps.seconds), steps.drained
        settling_s += settling_cost(steps.settling, reduce(seconds))
        if looks_early:
            plain = trial.steps["A"]
            if if_much_slower is not None and _is_much_slower(plain, seconds, reduce if is_drained else None):
                cost_s = max(0.0, settling_s) + len(seconds) * (reduce(seconds) - reduce(plain))
                return TrialResult(_ended_early(plain, seconds, if_much_slower, reduce), cost_s)
            if len(seconds) < config.block_steps:
                seconds += (yield Block(arm=arm, steps=config.block_steps - len(seconds))).seconds
        trial.record(seconds)
        slower_s = _slower_s(trial, reduce)
        if arm == "B" and trial.steps["A"] and trial.verdict is None and settling_s + slower_s > limit_s():
            outcome = _ended_early(trial.steps["A"], trial.steps["B"], "inconclusive", reduce)
            return TrialResult(outcome, max(0.0, settling_s) + max(0.0, slower_s), cut_short=True)
    return TrialResult(trial.outcome(), max(0.0, settling_s) + max(0.0, _slower_s(trial, reduce)))


def by_epochs(config: TrialConfig, *, phase: str = "") -> Comparing:
    """Compare whole epochs, each with its beginning: what counts is the mean step.

    `phase` is what B can shorten: where it takes less than `drop_gain` of the first epoch, there is nothing to win.
    """
    trial = Trial(config, reduce=statistics.fmean)
    took_s = {"A": 0.0, "B": 0.0}
    while trial.verdict is None:
        arm = trial.arm
        steps = yield Block(arm=arm, whole_epoch=True)
        if not steps.seconds:
            return TrialResult(None, why="the loop makes a new loader for each epoch")
        share = steps.phases.get(phase, 0.0) / sum(steps.seconds)
        if phase and not trial.steps["A"] and share < config.drop_gain:
            return TrialResult(None, why=f"{phase} is {share:.1%} of an epoch: too little to win")
        took_s[arm] += sum(steps.seconds)
        trial.record([statistics.fmean(steps.seconds)])
    return TrialResult(trial.outcome(), max(0.0, took_s["B"] - took_s["A"]))


def before_and_after(
    config: TrialConfig,
    *,
    before: Sequence[float],
    steps: int,
    settle: int,
    reduce: Reduce = statistics.median,
    limit_s: Callable[[], float] = lambda: math.inf,
) -> Comparing:
    """Compare the steps before a switch with those after it.

    A drift of the machine between the two does not cancel. So this is for what can do no harm: it is kept if the whole
    95 % interval lies above 1 + `keep_gain`.

    Args:
        config: the statistics.
        before: seconds of steps of A that have run already.
        steps: of A that are to run beside them.
        settle: steps to leave out after the switch; a block of its own.
        reduce: how a part of the step times becomes one number.
        limit_s: the trial ends early once it has made the run longer by more than this; asked after each part.
    """
    before = [*before, *(yield Block(arm="A", steps=steps)).seconds]
    settling = (yield Block(arm="B", steps=settle)).seconds if settle else ()
    after: list[float] = []
    cost_s = 0.0
    while len(after) < len(before) and cost_s <= limit_s():
        part = max(2, math.ceil(len(before) / _PARTS))
        after += (yield Block(arm="B", steps=min(part, len(before) - len(after)))).seconds
        slower_s = len(after) * (reduce(after) - reduce(before))
        cost_s = max(0.0, settling_cost(settling, reduce(after))) + max(0.0, slower_s)
    number = max(2, min(_PARTS, len(before), len(after)))
    blocks = [[reduce(part) for part in _parts(seconds, number)] for seconds in (before, after)]
    differences = log_ratios(*blocks)
    low, high = interval(differences, 0.025)
    gain = math.exp(statistics.fmean(differences))
    # Differences far from the others are pulled in, so the means of the blocks have another ratio.
    before_s, after_s = (math.exp(statistics.fmean(map(math.log, side))) for side in blocks)
    before_ms, after_ms = at_gain(before_s, after_s, gain)
    outcome = Outcome(
        verdict="keep" if low > math.log1p(config.keep_gain) else "drop",
        gain=gain,
        low=math.exp(low),
        high=math.exp(high),
        before_ms=before_ms,
        after_ms=after_ms,
        spread_ms=(max(blocks[1]) - min(blocks[1])) / 2 * 1e3,
        pairs=number,
    )
    return TrialResult(outcome, cost_s, why="faster than the steps before it")


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


def in_phase(settle: int, block_steps: int) -> int:
    """Return after how many settling steps, at least `settle`, the blocks of a pair begin with a step of the same kind.

    Where every second step is of another kind, as where a generator is updated in turns, an odd block has more of one:
    the median of five steps is of the kind of three.
    """
    return settle + 1 if block_steps % 2 and not settle % 2 else settle


def settling_cost(settling: Sequence[float], step_s: float) -> float:
    """Return what settling steps cost: they are real steps, so only their time above an ordinary one.

    The first after a device was drained is one of them: with no work before it, nothing hides its fetch. A stall of
    seconds is another process's, not the candidate's.
    """
    longest_s = max(_LONGEST_SETTLING * step_s, _LONGEST_SETTLING_S)
    return sum(min(seconds, longest_s) - step_s for seconds in settling)


def _is_much_slower(plain: Sequence[float], slower: Sequence[float], reduce: Reduce | None) -> bool:
    """Tell whether B's first steps are much slower than A's, by all of them.

    `reduce` is the level of a whole block; None where it is two steps. The median must agree: one stall moves a mean.
    """
    if reduce is None:
        return min(slower) > _MUCH_SLOWER * max(plain)
    return all(level(slower) > _MUCH_SLOWER * level(plain) for level in (reduce, statistics.median))


def _slower_s(trial: Trial, reduce: Reduce) -> float:
    """Return by how many seconds B's steps have been slower than A's, less than 0 if they were faster."""
    if not trial.steps["A"] or not trial.steps["B"]:
        return 0.0
    return len(trial.steps["B"]) * (reduce(trial.steps["B"]) - reduce(trial.steps["A"]))


def _ended_early(plain: Sequence[float], slower: Sequence[float], verdict: Verdict, reduce: Reduce) -> Outcome:
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


def _parts(seconds: Sequence[float], number: int) -> list[Sequence[float]]:
    """Return the seconds in so many parts, of which some are one step longer if need be."""
    cuts = [round(len(seconds) * part / number) for part in range(number + 1)]
    return [seconds[low:high] for low, high in itertools.pairwise(cuts)]
