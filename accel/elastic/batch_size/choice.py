"""Which batch size is better than the present one, whatever the noise scale within its interval may be.

    goodput(M) = M / step time(M) · efficiency(M)

A larger batch must win by a margin even if the noise scale is at its lower end, a smaller one even if it is at its
upper end: while the truth may lie on either side, the batch stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from accel.goodput.efficiency import UNMEASURED_SHARE, Bound, NoiseInterval, efficiency
from accel.goodput.noise_scale import NoiseEstimate

MARGIN = 1.05
"""How much better another batch must be, by its measured time too. AdaptDL's is the same. Where one that was tried
stayed for 1.01, a CNN came to its target 0.71 to 1.06 times as fast as by the best fixed batch, with this 0.74 to 1.13
times (three seeds each, in turns, two cores): larger batches stood, and took more samples than the noise scale says."""
_PER_DOUBLING = 2
"""Batch sizes that are considered between one and its double."""

Seconds = Callable[[int], float]


class Shares(NamedTuple):
    local: int
    steps: int


class Better(NamedTuple):
    """A better batch: its goodput (`ratio`), speed and worth are over those of the other."""

    batch: int
    ratio: float
    speed: float
    worth: float
    noise: float


def candidates(base: int, most: int, multiple: int = 1) -> list[int]:
    """Return the batch sizes that are considered, ascending, from `base` to `most`.

    Args:
        base: the user's batch, samples over all ranks.
        most: the largest allowed, samples, at least `base`.
        multiple: what all of them are multiples of: the batches of a step, over all ranks. Where the user's is none, as
            on another number of ranks than it was written for, the first is the next larger one.

    Example:
        >>> candidates(32, 200)
        [32, 45, 64, 91, 128, 181, 200]
    """
    steps = int(math.log2(most / base) * _PER_DOUBLING)
    spaced = (base * 2 ** (k / _PER_DOUBLING) / multiple for k in range(steps + 1))
    first, last = -(-base // multiple) * multiple, most // multiple * multiple
    rounded = (round(each) * multiple for each in spaced)  # the last of them may be above `most`
    return sorted({first, *(size for size in (last, *rounded) if first < size <= last)})


def better(now: int, sizes: Sequence[int], base: int, noise: NoiseInterval, seconds: Seconds) -> Better | None:
    """Return the size that is surely better than `now`, or None; `base` is what efficiency refers to.

    Example:
        >>> noise = NoiseInterval(1000.0, 800.0, 1300.0)
        >>> better(64, [32, 64, 128, 256], 32, noise, lambda batch: 0.01 + batch * 1e-5).batch
        256
    """
    return _best(now, [size for size in sizes if size > now], base, noise, "low", seconds) or _best(
        now, [size for size in sizes if size < now], base, noise, "high", seconds
    )


def _best(
    now: int, sizes: Sequence[int], base: int, noise: NoiseInterval, bound: Bound, seconds: Seconds
) -> Better | None:
    if not sizes:
        return None

    def worth(size: int) -> float:
        return float(efficiency(size, base, noise.at(size, bound)))

    def goodput(size: int) -> float:
        return size / seconds(size) * worth(size)

    best = max(sizes, key=goodput)
    ratio = goodput(best) / goodput(now)
    if ratio < MARGIN:
        return None
    speed = best / seconds(best) / (now / seconds(now))
    return Better(best, ratio, speed, worth(best) / worth(now), noise.at(best, bound))


def interval_of(estimate: NoiseEstimate) -> NoiseInterval | None:
    """Return the noise scale as the policy takes it; None before it was measured."""
    if math.isnan(estimate.phi):
        return None
    # Few measurements may put the variance below 0.
    phi = max(estimate.phi, estimate.low, 0.0)
    high = max(estimate.high, phi)
    return NoiseInterval(phi, estimate.low, high, batch=max(estimate.batch, 1.0), share=UNMEASURED_SHARE)
