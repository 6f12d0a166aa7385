"""The gradient noise scale: how many samples a step may have before more of them stop helping.

    φ = tr(Σ) / ‖μ‖²       μ: mean gradient, Σ: covariance of a single sample's gradient; φ counts samples

A step whose gradient G = Σ_k w_k S_k is made of parts, S_k the mean gradient of b_k samples, has

    E Σ_k w_k ‖S_k‖² = ‖μ‖² + tr(Σ) / B_small      1 / B_small = Σ_k w_k / b_k
    E ‖G‖²           = ‖μ‖² + tr(Σ) / B_big        1 / B_big   = Σ_k w_k² / b_k

Both unknowns follow without bias. They are averaged apart over the steps, and only the averages are divided. A ratio of
noisy means has no symmetric interval: Fieller's theorem gives one, unbounded above where ‖μ‖² can't be told from 0.

The averages are those of the second half of the run so far. ‖μ‖² falls by orders of magnitude in the first steps: with
weights that decay, these steps would outweigh hundreds of later ones (φ of 26 where the truth was some 150). Where the
second half has few measurements, older ones are taken, too: of the first eighth only to have six.

Sources: McCandlish et al., An Empirical Model of Large-Batch Training, 2018 (arXiv 1812.06162), appendix A.1; Qiao et
al., Pollux, OSDI 2021, section 3.1; Fieller, Some Problems in Interval Estimation, JRSS B 1954.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from accel.errors import InvalidArgument
from accel.profiler.trial import student_cdf, student_quantile

_LEAST_KEPT, _MOST_KEPT = 12, 256
"""Measurements: fewer say little; of more, the oldest are dropped."""
_LEAST_WITH_FIRST = 6
"""The same where the oldest is of the run's first eighth: gradients were far longer then."""
_FEWEST = 6
"""Measurements before the interval is bounded."""
_ZERO_LEVEL = 0.001
"""One-sided probability of taking a ‖μ‖² of 0 for more. Asked again and again, 0.025 would be wrong in most runs."""
_FAR_BELOW = -3.0
"""Deviations of a mean below 0 that are believed: more is no matter of chance."""
_HUGE = 1e150
"""Beyond, squares overflow; taken for not finite."""


class NoiseSums(NamedTuple):
    """What one step says of the noise: the squared gradients of its parts and of their mean.

        part_square = Σ_k w_k ‖S_k‖²,  mean_square = ‖G‖²,  part_samples = B_small,  samples = B_big

    Example:
        >>> sums = NoiseSums(part_square=5.0, mean_square=3.0, part_samples=8, samples=16)
        >>> sums.variance, sums.squared_norm
        (32.0, 1.0)
    """

    part_square: float
    mean_square: float
    part_samples: float
    samples: float

    @property
    def variance(self) -> float:
        return (self.part_square - self.mean_square) / (1 / self.part_samples - 1 / self.samples)

    @property
    def squared_norm(self) -> float:
        return self.mean_square - self.variance / self.samples


class NoiseEstimate(NamedTuple):
    """The noise scale with its interval, in samples."""

    phi: float
    """tr(Σ) / ‖μ‖²; inf where the average of ‖μ‖² is not above 0, nan before the first measurement."""
    low: float
    """What φ is surely above; 0 while nothing is sure."""
    high: float
    """What φ is surely below; inf where ‖μ‖² can't be told from 0."""
    measurements: int
    """In the averages."""
    batch: float = 0.0
    """Mean samples of the steps measured; 0 before the first."""


class _Measurement(NamedTuple):
    at: float
    """Samples trained on until then."""
    x: float
    """‖μ‖²."""
    y: float
    """tr(Σ)."""
    batch: float
    """Samples of the step."""


class _Means(NamedTuple):
    """Means of both unknowns and of the batch, and the variances and the covariance of the first two means."""

    number: int
    x: float
    y: float
    batch: float
    xx: float
    xy: float
    yy: float

    @classmethod
    def of(cls, kept: Sequence[_Measurement]) -> _Means:
        count = len(kept)
        if not count:
            return cls(0, *[0.0] * 6)
        x, y, batch = (math.fsum(column) / count for column in list(zip(*kept, strict=True))[1:])
        freedom = count * (count - 1) or 1
        xx = math.fsum((m.x - x) ** 2 for m in kept) / freedom
        xy = math.fsum((m.x - x) * (m.y - y) for m in kept) / freedom
        yy = math.fsum((m.y - y) ** 2 for m in kept) / freedom
        return cls(count, x, y, batch, xx, xy, yy)

    @property
    def phi(self) -> float:
        if not self.number:
            return math.nan
        return self.y / self.x if self.x > 0 else math.inf


@dataclass
class _Signal:
    """Mean of ‖μ‖² over the whole run, each step's in units of its own noise, so that none outweighs the others."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    """Of the deviations from the mean."""

    def add(self, x: float) -> None:
        self.count += 1
        delta = x - self.mean
        self.mean += delta / self.count
        self.squares += delta * (x - self.mean)

    @property
    def is_sure(self) -> bool:
        """True once ‖μ‖² is surely not 0: the job learns, or has learnt."""
        if self.count < _FEWEST:
            return False
        deviation = math.sqrt(self.squares / (self.count - 1) / self.count)
        return self.mean > student_quantile(1 - _ZERO_LEVEL, min(round(self.count) - 1, _MOST_KEPT)) * deviation


class NoiseScale:
    """Average what steps say of the noise, and estimate φ with an interval.

    Args:
        confidence: of the interval, in (0, 1); default 0.95.

    Attributes:
        measured: measurements taken in.
        skipped: measurements left out, since they were not finite.

    Raises:
        InvalidArgument: if a number is out of its range.

    Example:
        >>> noise = NoiseScale()
        >>> for step in range(40):
        ...     wobble = 0.02 * (-1) ** step
        ...     taken = noise.update(NoiseSums(5.0 + wobble, mean_square=3.0, part_samples=8, samples=16))
        >>> round(noise.phi), noise.estimate().low > 30
        (32, True)
    """

    def __init__(self, confidence: float = 0.95) -> None:
        if not 0 < confidence < 1:
            raise InvalidArgument(f"confidence must lie between 0 and 1, such as 0.95. Found: {confidence}.")
        self._confidence = confidence
        self._kept: deque[_Measurement] = deque(maxlen=_MOST_KEPT)
        self._signal = _Signal()
        self._samples = 0.0
        """Trained on until the last measurement."""
        self.measured = self.skipped = 0

    def update(self, sums: NoiseSums, samples: float | None = None) -> bool:
        """Take a step in, and return whether it was; what is not finite is skipped.

        Args:
            sums: of the measured step.
            samples: trained on since the update before, all steps counted; default those of this step.

        Raises:
            InvalidArgument: if the sums' sample counts can't be those of a mean of parts.
        """
        if not 0 < sums.part_samples < sums.samples < math.inf:
            raise InvalidArgument(
                "0 < part_samples < samples must hold: a step is the mean of two parts or more. Found: "
                f"{sums.part_samples:g}, {sums.samples:g}."
            )
        x, y = float(sums.squared_norm), float(sums.variance)  # numpy's numbers are none of JSON's
        if not (abs(x) < _HUGE and abs(y) < _HUGE):  # nan is not below
            self.skipped += 1
            return False
        self._samples += max(sums.samples if samples is None else samples, 0.0)
        self._kept.append(_Measurement(self._samples, x, y, float(sums.samples)))
        for part, least in ((2, _LEAST_KEPT), (8, _LEAST_WITH_FIRST)):
            while len(self._kept) > least and self._kept[0].at <= self._samples / part:
                self._kept.popleft()
        if (variance := self.variance) > 0:
            self._signal.add(x * sums.samples / variance)
        self.measured += 1
        return True

    def reset(self) -> None:
        """Forget all measurements: the gradients are of another kind from now on."""
        self._kept.clear()
        self._signal = _Signal()

    @property
    def _means(self) -> _Means:
        return _Means.of(self._kept)

    @property
    def squared_norm(self) -> float:
        """The average of ‖μ‖², which may be below 0; 0 before the first measurement."""
        return self._means.x

    @property
    def variance(self) -> float:
        """The average of tr(Σ); 0 before the first measurement."""
        return self._means.y

    @property
    def phi(self) -> float:
        """The noise scale in samples; inf where the average of ‖μ‖² is not above 0, nan before any measurement."""
        return self._means.phi

    def estimate(self, *, learns: bool = False) -> NoiseEstimate:
        """Return φ with its interval. Decide by its ends: labels of pure noise have a large φ, and 0 for lower end.

        Args:
            learns: it is known from elsewhere, such as a falling loss, that ‖μ‖² is not 0; by default that must have
                shown over the whole run. Where the second half is too noisy to show it alone, the lower end is tr(Σ),
                at its lower end, over ‖μ‖² at its upper end.
        """
        means = self._means
        low, high = 0.0, math.inf
        if means.number >= _FEWEST:
            low, high = self._interval(means, learns or self._signal.is_sure)
        return NoiseEstimate(means.phi, low, high, means.number, means.batch)

    def _interval(self, means: _Means, learns: bool) -> tuple[float, float]:
        """Return all φ for which tr(Σ) - φ ‖μ‖² is not significantly different from 0."""
        count, x, y, _, xx, xy, yy = means
        if x <= student_quantile(1 - _ZERO_LEVEL, count - 1) * math.sqrt(xx):
            return (self._sure_ratio(means) if learns else 0.0), math.inf
        t2 = student_quantile(0.5 + self._confidence / 2, count - 1) ** 2
        # a φ² - 2 b φ + c ≤ 0
        a, b, c = x * x - t2 * xx, x * y - t2 * xy, y * y - t2 * yy
        root = math.sqrt(max(b * b - a * c, 0.0))
        if a <= 0:  # a confidence beyond that of the test above
            return (max((b - root) / a, 0.0) if root else 0.0), math.inf
        return max((b - root) / a, 0.0), (b + root) / a

    def _sure_ratio(self, means: _Means) -> float:
        """Return what φ is surely above where ‖μ‖² is above 0, but can't be told from it.

        That it is above 0 counts: a mean that happens to come out below leaves ‖μ‖² at some share of its deviation, and
        not at next to nothing, which would make φ as large as you like (1e5 where the truth was some hundreds).
        """
        t = student_quantile(0.5 + self._confidence / 2, means.number - 1)
        longest = _longest(means.x, math.sqrt(means.xx), means.number - 1, 0.5 + self._confidence / 2)
        return max(means.y - t * math.sqrt(means.yy), 0.0) / longest if longest > 0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return what has been measured, as values that JSON can hold."""
        return {
            "measured": self.measured,
            "skipped": self.skipped,
            "samples": self._samples,
            "kept": [list(each) for each in self._kept],
            "signal": dict(vars(self._signal)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            InvalidArgument: if it is something else; nothing has been changed then.
        """
        try:
            measured, skipped, samples = int(state["measured"]), int(state["skipped"]), float(state["samples"])
            kept = [_Measurement(*map(float, each)) for each in state["kept"]]
            signal = _Signal(**{name: float(value) for name, value in state["signal"].items()})
            if not all(map(math.isfinite, [samples, *vars(signal).values(), *itertools.chain.from_iterable(kept)])):
                raise InvalidArgument("all numbers must be finite")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidArgument(
                "the state of a noise scale has measured, skipped, samples, kept and signal, as state_dict returns "
                f"them. Found: {state!r} ({type(error).__name__}: {error})."
            ) from None
        self.measured, self.skipped, self._samples = measured, skipped, samples
        self._kept, self._signal = deque(kept, maxlen=_MOST_KEPT), signal


def _longest(mean: float, deviation: float, degrees: int, p: float) -> float:
    """Return what a quantity that is above 0 is below with probability p: the quantile of t, cut off at 0.

    Args:
        mean: of its measurements, perhaps below 0.
        deviation: of that mean.
        degrees: of freedom.
        p: at least 0.5.
    """
    if deviation == 0:
        return max(mean, 0.0)
    below = student_cdf(-max(mean / deviation, _FAR_BELOW), degrees)
    return max(mean, _FAR_BELOW * deviation) + deviation * student_quantile(below + p * (1 - below), degrees)
