"""The gradient noise scale: how many samples a step may have before more of them stop helping.

    φ = tr(Σ) / ‖μ‖²       μ: mean gradient, Σ: covariance of a single sample's gradient; φ counts samples

A step whose gradient G = Σ_k w_k S_k is made of parts, S_k the mean gradient of b_k samples, has

    E Σ_k w_k ‖S_k‖² = ‖μ‖² + tr(Σ) / B_small      1 / B_small = Σ_k w_k / b_k
    E ‖G‖²           = ‖μ‖² + tr(Σ) / B_big        1 / B_big   = Σ_k w_k² / b_k

Both unknowns follow without bias. They are averaged apart over the steps, and only the averages are divided. A ratio of
noisy means has no symmetric interval: Fieller's theorem gives one, unbounded above where ‖μ‖² can't be told from 0.

Sources: McCandlish et al., An Empirical Model of Large-Batch Training, 2018 (arXiv 1812.06162), appendix A.1; Qiao et
al., Pollux, OSDI 2021, section 3.1; Fieller, Some Problems in Interval Estimation, JRSS B 1954.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from accel.errors import InvalidArgument
from accel.profiler import t_distribution as student

_WINDOW_STEPS = 1000
"""Steps of the first batch size after which a measurement counts 1/e."""
_LEAST_MEASUREMENTS = 24
"""The window never gets shorter than so many measurements: below, the interval says nothing."""
_FEWEST = 6
"""Effective measurements before the interval is bounded."""
_ZERO_LEVEL = 0.001
"""One-sided probability of taking a ‖μ‖² of 0 for more. Asked again and again, 0.025 would be wrong in most runs."""
_HUGE = 1e150
"""Beyond, squares overflow; taken for not finite."""


class NoiseSums(NamedTuple):
    """What one step says of the noise: the squared gradients of its parts and of their mean.

    Example:
        >>> sums = NoiseSums.of_parts(squares=[5.0, 5.0], mean_square=3.0, sizes=[8, 8])
        >>> sums.variance, sums.squared_norm
        (32.0, 1.0)
    """

    part_square: float
    """Σ_k w_k ‖S_k‖²."""
    mean_square: float
    """‖G‖²."""
    part_samples: float
    """B_small, samples: those of a part, where all are of equal size."""
    samples: float
    """B_big, samples: those of the step, where all count alike."""

    @classmethod
    def of_parts(
        cls,
        squares: Sequence[float],
        mean_square: float,
        sizes: Sequence[float],
        weights: Sequence[float] | None = None,
    ) -> NoiseSums:
        """Return the sums of a step from its parts.

        Args:
            squares: ‖S_k‖² of each part's mean gradient, at least two.
            mean_square: ‖G‖² of the step's gradient Σ_k w_k S_k.
            sizes: samples in each part, > 0.
            weights: w_k, which sum to 1; default the parts' shares of the samples.

        Raises:
            InvalidArgument: if there are fewer than two parts, or the lists don't match.
        """
        if weights is None:
            weights = [size / math.fsum(sizes) for size in sizes] if sizes and min(sizes) > 0 else [0.0] * len(sizes)
        if len(squares) < 2 or not len(squares) == len(sizes) == len(weights):
            counts = f"{len(squares)} squares, {len(sizes)} sizes, {len(weights)} weights"
            raise InvalidArgument(
                f"noise needs two parts or more, each with a square, a size and a weight. Found: {counts}."
            )
        if min(sizes) <= 0 or not math.isclose(math.fsum(weights), 1.0, rel_tol=1e-6) or min(weights) <= 0:
            raise InvalidArgument(
                f"sizes must be above 0, and weights above 0 with the sum 1. Found: sizes {list(sizes)}, "
                f"weights {list(weights)}."
            )
        small = math.fsum(w / b for w, b in zip(weights, sizes, strict=True))
        big = math.fsum(w * w / b for w, b in zip(weights, sizes, strict=True))
        part_square = math.fsum(w * square for w, square in zip(weights, squares, strict=True))
        return cls(part_square, mean_square, 1 / small, 1 / big)

    @property
    def variance(self) -> float:
        """An unbiased estimate of tr(Σ)."""
        return (self.part_square - self.mean_square) / (1 / self.part_samples - 1 / self.samples)

    @property
    def squared_norm(self) -> float:
        """An unbiased estimate of ‖μ‖², which may be below 0."""
        return self.mean_square - self.variance / self.samples


class NoiseEstimate(NamedTuple):
    """The noise scale with its interval, in samples."""

    phi: float
    """tr(Σ) / ‖μ‖²; inf where the average of ‖μ‖² is not above 0, nan before the first measurement."""
    low: float
    """What φ is surely above; 0 while nothing is sure."""
    high: float
    """What φ is surely below; inf where ‖μ‖² can't be told from 0."""
    measurements: float
    """Effective number of measurements in the averages."""


@dataclass
class _Moments:
    """Exponentially weighted means, and sums of products of the deviations from them; x is ‖μ‖², y is tr(Σ)."""

    weight: float = 0.0
    square_weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def add(self, x: float, y: float, decay: float) -> None:
        """Add a pair after the older ones' weights have decayed."""
        self.weight = decay * self.weight + 1.0
        self.square_weight = decay * decay * self.square_weight + 1.0
        dx, dy = x - self.x, y - self.y
        self.x += dx / self.weight
        self.y += dy / self.weight
        self.xx = decay * self.xx + dx * (x - self.x)
        self.xy = decay * self.xy + dx * (y - self.y)
        self.yy = decay * self.yy + dy * (y - self.y)

    @property
    def count(self) -> float:
        """Effective number of pairs."""
        return self.weight**2 / self.square_weight if self.square_weight else 0.0

    def covariance(self) -> tuple[float, float, float]:
        """Return the variances and the covariance of both means: xx, xy, yy."""
        freedom = self.weight - self.square_weight / self.weight
        factor = self.square_weight / self.weight**2 / freedom
        return self.xx * factor, self.xy * factor, self.yy * factor


class NoiseScale:
    """Average what steps say of the noise, and estimate φ with an interval.

    Args:
        window_samples: samples after which a measurement counts 1/e; default 1000 batches of the first size. In steps
            the window gets shorter as the batch grows, since each step then says more; it never has fewer than 24
            measurements.
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

    def __init__(self, window_samples: float | None = None, confidence: float = 0.95) -> None:
        if window_samples is not None and not 0 < window_samples < math.inf:
            raise InvalidArgument(f"window_samples must be a finite number above 0. Found: {window_samples}.")
        if not 0 < confidence < 1:
            raise InvalidArgument(f"confidence must lie between 0 and 1, such as 0.95. Found: {confidence}.")
        self._window, self._confidence = window_samples, confidence
        self._moments = _Moments()
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
        if self._window is None:
            self._window = _WINDOW_STEPS * sums.samples
        passed = sums.samples if samples is None else samples
        # An average with decay exp(-1/k) has the variance of 2k equal weights.
        self._moments.add(x, y, math.exp(-min(max(passed, 0.0) / self._window, 2 / _LEAST_MEASUREMENTS)))
        self.measured += 1
        return True

    def reset(self) -> None:
        """Forget all measurements: the gradients are of another kind from now on."""
        self._moments = _Moments()

    @property
    def squared_norm(self) -> float:
        """The average of ‖μ‖², which may be below 0; 0 before the first measurement."""
        return self._moments.x

    @property
    def variance(self) -> float:
        """The average of tr(Σ); 0 before the first measurement."""
        return self._moments.y

    @property
    def phi(self) -> float:
        """The noise scale in samples; inf where the average of ‖μ‖² is not above 0, nan before any measurement."""
        if not self._moments.weight:
            return math.nan
        return self.variance / self.squared_norm if self.squared_norm > 0 else math.inf

    def estimate(self, *, learns: bool = False) -> NoiseEstimate:
        """Return φ with its interval. Decide by its ends: labels of pure noise have a large φ, and 0 for lower end.

        Args:
            learns: it is known from elsewhere, such as a falling loss, that ‖μ‖² is not 0. Where the gradients are too
                noisy to show it, the lower end is then tr(Σ), at its lower end, over ‖μ‖² at its upper end.
        """
        count = self._moments.count
        if count < _FEWEST:
            return NoiseEstimate(self.phi, 0.0, math.inf, count)
        low, high = self._interval(min(round(count) - 1, 200), learns)
        return NoiseEstimate(self.phi, low, high, count)

    def _interval(self, degrees: int, learns: bool) -> tuple[float, float]:
        """Return all φ for which tr(Σ) - φ ‖μ‖² is not significantly different from 0."""
        x, y = self.squared_norm, self.variance
        xx, xy, yy = self._moments.covariance()
        if x <= student.quantile(1 - _ZERO_LEVEL, degrees) * math.sqrt(xx):
            return (self._sure_ratio(degrees) if learns else 0.0), math.inf
        t2 = student.quantile(0.5 + self._confidence / 2, degrees) ** 2
        # a φ² - 2 b φ + c ≤ 0
        a, b, c = x * x - t2 * xx, x * y - t2 * xy, y * y - t2 * yy
        root = math.sqrt(max(b * b - a * c, 0.0))
        if a <= 0:  # a confidence beyond that of the test above
            return (max((b - root) / a, 0.0) if root else 0.0), math.inf
        return max((b - root) / a, 0.0), (b + root) / a

    def _sure_ratio(self, degrees: int) -> float:
        """Return what φ is surely above where ‖μ‖² is above 0, but can't be told from it."""
        xx, _, yy = self._moments.covariance()
        t = student.quantile(0.5 + self._confidence / 2, degrees)
        longest, least = self.squared_norm + t * math.sqrt(xx), self.variance - t * math.sqrt(yy)
        return max(least, 0.0) / longest if longest > 0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return what has been measured, as values that JSON can hold."""
        averages = dict(vars(self._moments))
        return {
            "window_samples": self._window,
            "measured": self.measured,
            "skipped": self.skipped,
            "averages": averages,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            InvalidArgument: if it is something else; nothing has been changed then.
        """
        try:
            window = state["window_samples"]
            window = None if window is None else float(window)
            measured, skipped = int(state["measured"]), int(state["skipped"])
            moments = _Moments(**{name: float(value) for name, value in state["averages"].items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidArgument(
                "the state of a noise scale has window_samples, measured, skipped and averages, as state_dict returns "
                f"them. Found: {state!r} ({type(error).__name__}: {error})."
            ) from None
        if not all(map(math.isfinite, vars(moments).values())) or (window is not None and not 0 < window < math.inf):
            raise InvalidArgument(f"the state of a noise scale must have finite numbers. Found: {state!r}.")
        self._window, self.measured, self.skipped, self._moments = window, measured, skipped, moments
