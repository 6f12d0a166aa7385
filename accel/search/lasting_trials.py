"""Trials of what saves page faults: its effect may outlast it, and then steps without it show nothing of it.

So blocks take turns only for as long as plain steps fault as before; else what came before it is compared with what
comes after.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

from accel.profiler.trial import Arm, Outcome, TrialConfig, Verdict, at_gain, interval, log_ratios
from accel.search.actions import Action, Result
from accel.search.plan import Choices
from accel.search.trials import Act, TrialResult, by_blocks, settling_cost

_BLOCKS = 10
"""Before, and after, a switch that can't be taken back."""
_BLOCK_S = 0.3
"""Each of them lasts at least so long: fast steps are disturbed for many at a time."""
_STILL_FAULTS = 0.5
"""Of the page faults that B saves, the share that steps of A have again where its effect has not lasted."""
_LEAST_BEFORE = 2
"""Steps before a switch that can be compared with those after it."""
_IN_A_ROW = 2
"""Blocks of A without them show that it has."""
_SAVED = 0.2
"""Share of A's page faults from which on B saves some; where it doesn't, the heap had grown before it."""


def _steps_before(config: TrialConfig, step_s: float) -> int:
    """Return the steps before a switch that can't be taken back, each of about `step_s` seconds."""
    return _BLOCKS * max(config.block_steps, round(_BLOCK_S / step_s))


def before_and_after(
    act: Act,
    a: Choices,
    b: Choices,
    *,
    settle: int,
    config: TrialConfig,
    reduce: Callable[[Sequence[float]], float],
    step_s: float,
    before: Sequence[float] = (),
    faults: float | None = None,
) -> Generator[Action, Result, TrialResult | None]:
    """Compare the steps before a switch with those after it, for what can't be switched back; None if interrupted.

    A drift of the machine between them doesn't cancel. So this is for what can do no harm: it is kept if the whole 95 %
    interval lies above 1 + `keep_gain`.

    Args:
        act: runs an action.
        a: the plan before.
        b: the plan after.
        settle: steps to leave out after the switch.
        config: the statistics of the trial.
        reduce: how a block of step times becomes one number.
        step_s: about a step's time, > 0.
        before: seconds of steps under `a` that have been measured already.
        faults: page faults of one of them.
    """
    if len(before) < _LEAST_BEFORE:
        steps = _steps_before(config, step_s)
        result = yield from act(Action(plan=a, steps=steps))
        if result is None:
            return None
        before, faults = result.seconds, result.page_faults
    result = yield from act(Action(plan=b, steps=len(before), settle=settle))
    if result is None:
        return None
    settling = settling_cost(result.settling, reduce(result.seconds))
    tried = _compared(before, result.seconds, settling, config, reduce)
    return tried._replace(outcome=replace(tried.outcome, saved_faults=_saved(faults, result.page_faults)))


def in_turns_unless_it_lasts(
    act: Act,
    a: Choices,
    b: Choices,
    *,
    settle: int,
    config: TrialConfig,
    reduce: Callable[[Sequence[float]], float],
    step_s: float,
) -> Generator[Action, Result, TrialResult | None]:
    """Run a trial of what saves page faults: in blocks of steps for as long as those of A fault as before B.

    Once they don't, blocks compare nothing. Then the steps before the first of B's are compared with as many of B.
    Where B saves none, something else has saved them before, and that it gives nothing is no verdict on it.

    Args:
        act: runs an action.
        a: the plan before.
        b: the plan after.
        settle, config, reduce, step_s: as of `before_and_after`.
    """
    lasting = _Lasting(reduce)

    def watched(action: Action) -> Generator[Action, Result, Result | None]:
        result = yield from act(action)
        if result is not None:
            lasting.add("A" if action.plan == a else "B", result)
        return None if lasting.shows else result

    if (yield from watched(Action(plan=a, steps=_steps_before(config, step_s)))) is None:
        return None
    tried = yield from by_blocks(watched, a, b, settle=settle, config=config, reduce=reduce)
    if not lasting.shows:
        return None if tried is None else _unless_void(tried, lasting.saved)
    missing = len(lasting.before_s) - len(lasting.with_b_s)
    more = (yield from act(Action(plan=b, steps=missing, settle=settle))) if missing > 0 else Result()
    if more is None:
        return None
    settling = lasting.settling + settling_cost(more.settling, reduce(lasting.with_b_s))
    tried = _compared(lasting.before_s, lasting.with_b_s + more.seconds, settling, config, reduce)
    return tried._replace(outcome=replace(tried.outcome, saved_faults=lasting.saved, lasts=True))


def _unless_void(tried: TrialResult, saved: float | None) -> TrialResult:
    """Return a trial in turns without its verdict if it gave nothing, since it saved no page faults."""
    outcome = replace(tried.outcome, saved_faults=saved)
    is_void = outcome.verdict == "drop" and saved == 0
    return tried._replace(outcome=replace(outcome, verdict="refused") if is_void else outcome)


class _Lasting:
    """Tell by page faults whether the effect of B outlasts it.

    Args:
        reduce: how a block of step times becomes one number.
    """

    def __init__(self, reduce: Callable[[Sequence[float]], float]) -> None:
        self._reduce = reduce
        self.before_s: list[float] = []
        """Seconds of the steps of A that B has not changed."""
        self.with_b_s: list[float] = []
        self.settling = 0.0
        """What the settling of B has cost, s."""
        self._plain: float | None = None
        """Page faults of a step of A, just before B."""
        self._with_b: float | None = None
        self._without = 0
        """Blocks of A in a row that lack page faults."""

    @property
    def shows(self) -> bool:
        """True once blocks of A lack the page faults that B saves."""
        return self._without >= _IN_A_ROW

    @property
    def saved(self) -> float | None:
        """Page faults that steps of B have less than those of A just before them had; 0 for few of them."""
        return _saved(self._plain, self._with_b)

    def add(self, arm: Arm, result: Result) -> None:
        """Take steps in, those of A before any of B's first."""
        faults = result.page_faults
        if arm == "B":
            self._with_b = faults
            self.with_b_s += result.seconds
            self.settling += settling_cost(result.settling, self._reduce(result.seconds))
            return
        if not self.with_b_s:
            self._plain = faults
        elif result.settling:  # A's cost, too
            self.settling += settling_cost(result.settling, self._reduce(result.seconds))
        self._without = self._without + 1 if self._lacks(faults) else 0
        if not self._without:
            self.before_s += result.seconds

    def _lacks(self, faults: float | None) -> bool:
        if faults is None or self._with_b is None or not self.saved:
            return False
        return faults < self._with_b + _STILL_FAULTS * self.saved


def _saved(before: float | None, after: float | None) -> float | None:
    if before is None or after is None:
        return None
    return before - after if before - after > _SAVED * before else 0.0


def _compared(
    before: Sequence[float],
    after: Sequence[float],
    settling: float,
    config: TrialConfig,
    reduce: Callable[[Sequence[float]], float],
) -> TrialResult:
    """Return what the steps before a switch and those after it show; `settling` is what the latter's settling cost."""
    slower = reduce(after) - reduce(before)
    number = max(2, min(_BLOCKS, len(before), len(after)))
    blocks = [[reduce(block) for block in _blocks(seconds, number)] for seconds in (before, after)]
    differences = log_ratios(*blocks)
    low, high = interval(differences, 0.025)
    verdict: Verdict = "keep" if low > math.log1p(config.keep_gain) else "drop"
    gain = math.exp(statistics.fmean(differences))
    # Differences beyond the others are pulled in, so the means of the blocks have another ratio.
    before_s, after_s = (math.exp(statistics.fmean(map(math.log, side))) for side in blocks)
    before_ms, after_ms = at_gain(before_s, after_s, gain)
    outcome = Outcome(
        verdict=verdict,
        gain=gain,
        low=math.exp(low),
        high=math.exp(high),
        before_ms=before_ms,
        after_ms=after_ms,
        spread_ms=(max(blocks[1]) - min(blocks[1])) / 2 * 1e3,
        pairs=number,
        in_turns=False,
    )
    return TrialResult(outcome, max(0.0, settling) + max(0.0, len(after) * slower))


def _blocks(seconds: Sequence[float], number: int) -> list[Sequence[float]]:
    """Return the seconds in so many parts, of which some are one step longer if need be."""
    cuts = [round(len(seconds) * part / number) for part in range(number + 1)]
    return [seconds[low:high] for low, high in itertools.pairwise(cuts)]


def at_most(outcome: Outcome, gain: float, keep_gain: float) -> Outcome:
    """Return the outcome of a comparison before and after with no more than the gain that is possible at all.

    What seems more is the machine's: the steps before were disturbed. So those after it set the level.

    Args:
        outcome: of the comparison.
        gain: the largest possible, as a ratio.
        keep_gain: what is surely above this is kept, as a fraction.
    """
    if outcome.in_turns or outcome.gain <= gain:
        return outcome
    low, high = (end * gain / outcome.gain for end in (outcome.low, outcome.high))
    verdict: Verdict = "keep" if low > 1 + keep_gain else "drop"
    return replace(outcome, verdict=verdict, gain=gain, low=low, high=high, before_ms=outcome.after_ms * gain)


def by_faults(outcome: Outcome, drop_gain: float) -> Outcome:
    """Keep what looks faster where noise leaves that open, if steps with it are seen to have less page faults.

    Args:
        outcome: of what saves page faults.
        drop_gain: what is surely below this is dropped, as a fraction.
    """
    if outcome.verdict == "keep" or not outcome.saved_faults or outcome.gain < 1:
        return outcome
    is_open = outcome.verdict == "refused" or (not outcome.in_turns and outcome.high > 1 + drop_gain)
    return replace(outcome, verdict="keep") if is_open else outcome
