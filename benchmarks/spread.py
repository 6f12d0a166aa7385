"""The statistics of the benchmarks: a middle, and how far apart the rounds or turns lie."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from accel.profiler.trial import interval, winsorised


class Spread(NamedTuple):
    """A median, and what lies below and above it."""

    median: float
    low: float
    high: float

    def named(self, middle: str, low: str, high: str) -> dict[str, float]:
        """Return the three as columns of a row."""
        return dict(zip((middle, low, high), self, strict=True))


def fifths(values: Sequence[float]) -> Spread:
    """Return the median, and the 20th and 80th percentiles."""
    return _quantiles(values, 5)


def quartiles(values: Sequence[float]) -> Spread:
    """Return the median, and the first and third quartiles."""
    return _quantiles(values, 4)


def extremes(values: Sequence[float]) -> Spread:
    """Return the median, the least and the most."""
    return Spread(statistics.median(values), min(values), max(values))


def median_interval(values: Sequence[float]) -> Spread:
    """Return the median and its 95 % interval, by order statistics."""
    ordered = sorted(values)
    reach = 0.98 * math.sqrt(len(ordered))
    low, high = (round(len(ordered) / 2 + side) for side in (-reach, reach))
    return Spread(statistics.median(ordered), ordered[max(0, low)], ordered[min(len(ordered) - 1, high)])


def _quantiles(values: Sequence[float], parts: int) -> Spread:
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    cuts = statistics.quantiles(values, n=parts, method="inclusive")
    return Spread(statistics.median(values), cuts[0], cuts[-1])


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of ratios, which is the same whichever way round they are taken.

    Raises:
        ValueError: if there is none, or one is not above 0.
    """
    if not values or min(values) <= 0:
        raise ValueError(f"values must be at least one ratio above 0. Found: {list(values)}")
    return math.exp(statistics.fmean(map(math.log, values)))


def ratios(slow: Sequence[float], fast: Sequence[float]) -> list[float]:
    """Return slow ÷ fast, round by round."""
    return [a / b for a, b in zip(slow, fast, strict=True)]


@dataclass(frozen=True)
class Ratio:
    """A ratio of step times with its 95 % interval, from pairs of neighbouring turns."""

    value: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.value:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def ratio(slow: Sequence[Sequence[float]], fast: Sequence[Sequence[float]]) -> Ratio:
    """Return median(slow) ÷ median(fast) turn by turn: mean of the logarithms, Student's interval."""
    pairs = list(zip(slow, fast, strict=False))
    # The first steps of a turn find cold caches: they are left out.
    pairs = [(a[2:] if len(a) > 5 else a, b[2:] if len(b) > 5 else b) for a, b in pairs]
    logs = winsorised([math.log(statistics.median(a) / statistics.median(b)) for a, b in pairs if a and b])
    low, high = interval(logs, 0.025)
    return Ratio(math.exp(statistics.fmean(logs)), math.exp(low), math.exp(high), len(logs))
