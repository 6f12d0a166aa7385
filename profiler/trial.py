"""The interleaved experiment: is B faster than A, on this machine, now?

Blocks of steps run in the order A B B A A B B A …, so that each A block has a B block right beside it and a slow drift
of the machine cancels. A pair of neighbouring blocks gives one number, d = log(median A ÷ median B); the mean of these
with Student's interval is the answer. Medians drop single stalls, pairs drop drifts, differences beyond five robust
standard deviations are pulled in (a burst of another process), and the interval expresses the remaining noise.

    keep          the whole interval lies above `keep_gain`; asked only at a few looks (6, 12, 24, 36 pairs), whose
                  error probabilities add up to `alpha`, so that peeking does not create false keeps
    drop          the interval lies below `drop_gain`; asked after every pair from the third on, at a laxer level: a
                  wrong drop loses a chance, a wrong keep loses trust
    inconclusive  still open when the pairs run out: the machine is too noisy for an effect this small. Pairs of fast
                  steps take little time, so they run out later where B looks faster by more than `worth_gain`

This is the statistics; which blocks are run, and what they cost, is the part of `accel.profiler.trial_driver`. Loaders
compare many settings at once: they run them there and back again, and judge them by the same ratios and intervals.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, get_args

from accel.profiler.errors import InvalidArgument, InvalidState

Arm = Literal["A", "B"]
Verdict = Literal["keep", "drop", "inconclusive"]


_BLOCK_S = 0.4
"""Seconds beyond which a block need not last."""
_BRIEF_PAIRS = 12
"""Of a first trial."""
_MOST_LOOKS = 3
"""Further ones: each doubles the pairs."""
_TRIAL_S = 24.0
"""Seconds that 36 pairs of slow steps take: so long may a trial of fast ones go on where B looks faster."""


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """Knobs of an interleaved trial."""

    block_steps: int = 5
    """Counted steps in a block."""
    looks: tuple[int, ...] = (6, 12, 24, 36)
    """Numbers of pairs at which a keep may be decided; the last of them ends the trial."""
    alpha: float = 0.002
    """One-sided probability of keeping something whose gain is `keep_gain` or less, over all looks together."""
    drop_alpha: float = 0.1
    """One-sided level at which a pair count beyond `min_pairs` may end in a drop."""
    min_pairs: int = 3
    """Pairs before a drop may be decided."""
    keep_gain: float = 0.005
    """What is surely above this is kept, as a fraction."""
    drop_gain: float = 0.03
    """What is likely below this is dropped; above `keep_gain`, so that a small gain is decided soon, either way."""
    more_looks: tuple[int, ...] = ()
    """Further looks, after the last of `looks`, for as long as B looks faster by more than `worth_gain`: a smaller gain
    is not worth the time, in which half of the steps go without it."""
    worth_gain: float = 0.03
    """What looks faster by more than this may take the further looks."""
    first: Arm = "A"
    """The arm of the first block; "B" where plain steps are very slow."""

    def __post_init__(self) -> None:
        if self.block_steps < 1:
            raise InvalidArgument(f"block_steps must be at least 1, got {self.block_steps}")
        looks = (*self.looks, *self.more_looks)
        if not self.looks or any(b <= a for a, b in zip((1, *looks), looks, strict=False)):
            raise InvalidArgument(f"looks must be increasing and start at 2 or more, got {looks}")
        if not 0 < self.alpha < 0.5 or not 0 < self.drop_alpha < 0.5:
            raise InvalidArgument(f"alpha and drop_alpha must lie in (0, 0.5), got {self.alpha} and {self.drop_alpha}")
        if self.first not in get_args(Arm):
            raise InvalidArgument(f"first must be one of {get_args(Arm)}, got {self.first!r}")
        if self.min_pairs < 2:
            raise InvalidArgument(f"min_pairs must be at least 2, got {self.min_pairs}")

    def brief(self) -> TrialConfig | None:
        """Return the knobs of a first trial, which ends after twelve pairs; None if these do so themselves.

        A large gain is clear after four pairs. Half of `alpha` is left for the trial at length.
        """
        looks = (4, *(pairs for pairs in self.looks if 4 < pairs <= _BRIEF_PAIRS))
        return replace(self, looks=looks, alpha=self.alpha / 2) if self.looks[-1] > _BRIEF_PAIRS else None

    def early(self) -> TrialConfig:
        """Return the knobs of a trial at length that looks after four pairs too, for a gain that may be large."""
        return replace(self, looks=(4, *self.looks)) if self.looks[0] > 4 else self

    def for_steps_of(self, step_s: float) -> TrialConfig:
        """Return the knobs for steps of so many seconds: blocks of slow steps have fewer, at least two.

        What disturbs steps lasts tenths of a second, so blocks of the same time have the same noise, however many steps
        they count; and trials of the same time, however many pairs. Trials of fast steps get more of them.
        """
        if step_s <= 0:
            return self
        block_steps = max(min(2, self.block_steps), min(self.block_steps, round(_BLOCK_S / step_s)))
        return replace(self, block_steps=block_steps, more_looks=self._more_looks(2 * block_steps * step_s))

    def _more_looks(self, pair_s: float) -> tuple[int, ...]:
        if self.looks[-1] <= _BRIEF_PAIRS:
            return ()  # a brief trial stays one
        looks = [self.looks[-1]]
        while 2 * looks[-1] * pair_s <= _TRIAL_S and len(looks) <= _MOST_LOOKS:
            looks.append(2 * looks[-1])
        return tuple(looks[1:])

    def at_length(self) -> TrialConfig:
        """Return the knobs of a trial after a brief one: the other half of `alpha`, and no drop before six pairs."""
        return replace(self, min_pairs=max(self.min_pairs, 6), alpha=self.alpha / 2)

    def of_kept(self) -> TrialConfig:
        """Return the knobs of a further trial of what was kept: it goes once it no longer has what a keep takes.

        Dropped by `drop_gain`, a gain of 1 to 2.5 %, which is kept, was undone whenever the machine became slower.
        """
        return replace(self.at_length(), drop_gain=self.keep_gain)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a trial: B's speed-up over A with its interval."""

    verdict: Verdict
    gain: float
    """median A ÷ median B as a ratio: 1.25 is 25 % faster."""
    low: float
    """Lower end of the 95 % interval of `gain`."""
    high: float
    before_ms: float
    """Step of A, ms: before ÷ after is `gain`, and their geometric mean that of both arms' median blocks."""
    after_ms: float
    """Step of B, ms."""
    spread_ms: float
    """Half the interquartile range of B's steps, ms."""
    pairs: int


@dataclass
class Trial:
    """One A/B experiment: ask `arm`, run a block of it, `record` its step times, until `verdict` is set.

    Args:
        config: the knobs.
        reduce: how a block's step times become one number, default the median; on a device that runs ahead of the
            host, pass `statistics.fmean` and measure from synchronisation to synchronisation.

    Example:
        >>> trial = Trial()
        >>> while trial.verdict is None:
        ...     trial.record([0.02, 0.021, 0.02, 0.02] if trial.arm == "A" else [0.01, 0.011, 0.01, 0.01])
        >>> trial.verdict
        'keep'
    """

    config: TrialConfig = field(default_factory=TrialConfig)
    reduce: Callable[[Sequence[float]], float] = statistics.median
    blocks: dict[Arm, list[float]] = field(default_factory=lambda: {"A": [], "B": []})
    steps: dict[Arm, list[float]] = field(default_factory=lambda: {"A": [], "B": []})
    verdict: Verdict | None = None

    @property
    def arm(self) -> Arm:
        """The arm whose block comes next: A B B A A B B A …, or B A A B B A A B …"""
        done = len(self.blocks["A"]) + len(self.blocks["B"])
        arms: tuple[Arm, Arm] = ("A", "B") if self.config.first == "A" else ("B", "A")
        return arms[((done + 1) // 2) % 2]

    def record(self, seconds: Sequence[float]) -> None:
        """Take the step times of one block of the current arm, s; sets `verdict` once it is decided."""
        if self.verdict is not None:
            raise InvalidState("the trial is decided; a block came after its verdict")
        if not seconds or min(seconds) <= 0:
            raise InvalidArgument(f"a block needs positive step times, got {list(seconds)}")
        arm = self.arm
        self.blocks[arm].append(self.reduce(seconds))
        self.steps[arm].extend(seconds)
        if len(self.blocks["A"]) == len(self.blocks["B"]):
            self.verdict = self._decide()

    def _differences(self) -> list[float]:
        return log_ratios(self.blocks["A"], self.blocks["B"])

    def _decide(self) -> Verdict | None:
        pairs, config = len(self.blocks["A"]), self.config
        looks = (*config.looks, *config.more_looks)
        if pairs in looks:
            low, _ = interval(self._differences(), config.alpha / len(looks))
            if low > math.log1p(config.keep_gain):
                return "keep"
        if pairs >= config.min_pairs:
            _, high = interval(self._differences(), config.drop_alpha)
            if high < math.log1p(config.drop_gain):
                return "drop"
        if pairs < config.looks[-1]:
            return None
        is_promising = statistics.fmean(self._differences()) > math.log1p(config.worth_gain)
        return None if is_promising and pairs < looks[-1] else "inconclusive"

    def outcome(self) -> Outcome:
        """Return the result of the trial.

        Raises:
            InvalidState: before a verdict.
        """
        if self.verdict is None:
            raise InvalidState("the trial has no verdict yet")
        differences = self._differences()
        low, high = interval(differences, 0.025)
        gain = math.exp(statistics.fmean(differences))
        # Medians over the whole trial differ in ratio where the machine drifts. Single steps of a host that runs ahead
        # of its device are those of queueing work.
        before_s, after_s = (statistics.median(self.blocks[arm]) for arm in ("A", "B"))
        before_ms, after_ms = at_gain(before_s, after_s, gain)
        quarters = statistics.quantiles(self.steps["B"], n=4) if len(self.steps["B"]) > 1 else [0.0, 0.0, 0.0]
        return Outcome(
            verdict=self.verdict,
            gain=gain,
            low=math.exp(low),
            high=math.exp(high),
            before_ms=before_ms,
            after_ms=after_ms,
            spread_ms=(quarters[2] - quarters[0]) / 2 * 1e3,
            pairs=len(differences),
        )


def at_gain(before_s: float, after_s: float, gain: float) -> tuple[float, float]:
    """Return both steps, ms, at their common level and with the ratio of a gain: all figures are of one estimate."""
    level, half = math.sqrt(before_s * after_s) * 1e3, math.sqrt(gain)
    return level * half, level / half


def log_ratios(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """Return each pair of neighbouring blocks' estimate of the speed-up: log(before ÷ after), winsorised."""
    return winsorised([math.log(a / b) for a, b in zip(before, after, strict=True)])


def winsorised(differences: Sequence[float], limit: float = 5.0) -> list[float]:
    """Pull differences beyond `limit` robust standard deviations (1.4826 · MAD) from the median in to that distance.

    Fewer than six are left alone: their MAD says too little. Measured on 3,000 simulated trials at exactly the smallest
    gain worth keeping: false keeps 0.13 % in Gaussian noise, 0.43 % with 30 % of steps three times as long (nominal
    0.2 %); a 30 % gain under such bursts is kept in 95 % of trials instead of 35 %.
    """
    if len(differences) < 6:
        return list(differences)
    middle = statistics.median(differences)
    reach = limit * 1.4826 * statistics.median(abs(d - middle) for d in differences)
    return [min(max(d, middle - reach), middle + reach) for d in differences]


def interval(differences: Sequence[float], alpha: float) -> tuple[float, float]:
    """Return the two-sided interval of the mean of paired differences, `alpha` in each tail.

        mean ± t(1 − α, n − 1) · s / √n

    Args:
        differences: n ≥ 2 independent differences.
        alpha: probability left out at each end.

    Raises:
        InvalidArgument: with fewer than two differences.
    """
    n = len(differences)
    if n < 2:
        raise InvalidArgument(f"an interval needs at least 2 pairs, got {n}")
    mean = statistics.fmean(differences)
    half = student_quantile(1 - alpha, n - 1) * statistics.stdev(differences) / math.sqrt(n)
    return mean - half, mean + half


# -- Student's t distribution, without a statistics package ------------------------------------------------------------


def student_cdf(t: float, degrees: int) -> float:
    """Return P(T ≤ t) for Student's t with `degrees` ≥ 1 degrees of freedom.

    Closed form of the central probability A(t | ν): Abramowitz & Stegun, Handbook of Mathematical Functions,
    26.7.3-26.7.4.
    """
    theta = math.atan(abs(t) / math.sqrt(degrees))
    cos, sin = math.cos(theta), math.sin(theta)
    odd = degrees % 2 == 1
    term = cos if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(3 if odd else 2, degrees - 1, 2):
        term *= cos * cos * (k - 1) / k
        total += term
    central = 2 / math.pi * (theta + sin * total) if odd else sin * total
    return 0.5 + math.copysign(min(central, 1.0), t) / 2  # rounding takes far tails an ulp beyond 1


@lru_cache(maxsize=256)
def student_quantile(p: float, degrees: int) -> float:
    """Return t with P(T ≤ t) = p, for 0.5 ≤ p < 1, to 1e-9."""
    low, high = 0.0, 1.0
    while student_cdf(high, degrees) < p:
        high *= 2
    while high - low > 1e-9 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, degrees) < p else (low, middle)
    return high
