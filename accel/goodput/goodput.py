"""Goodput: samples per second times what a sample is worth, and the batch at which it is highest.

    goodput(nodes, K, m, s) = throughput(nodes, K, m, s) · efficiency(M),   M = K · m · (s + 1) ≥ M0

m samples per replica and micro-step, s further micro-steps, K replicas, M0 the batch of the user. Goodput is in samples
per second as if all steps were of M0. Pollux, https://www.usenix.org/conference/osdi21/presentation/qiao, equation 4.

Accumulation never pays by itself: with p-norms for both sums, one micro-step of (s + 1) m is at most as long as s + 1
of m. So s > 0 is chosen only where memory bounds m, or where one replica needs two gradients to measure the noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from accel.errors import InvalidArgument
from accel.goodput.efficiency import Bound, NoiseInterval, efficiency
from accel.goodput.throughput import Floats, ThroughputModel

Ints = NDArray[np.int64]

GRID = 33
"""Local batches that are compared at once; a range of a million is narrowed down to single ones in five rounds."""


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """Between which batches may be chosen.

    Raises:
        InvalidArgument: if a limit is out of its range.
    """

    max_batch_size: int | None = None
    """Most samples of a step; None keeps the user's batch."""
    local_min: int = 1
    """Fewest samples per replica and micro-step."""
    local_max: int | None = None
    """Most samples per replica and micro-step: what fits into memory. None for no limit."""
    max_accumulation: int = 0
    """Most further micro-steps."""
    min_gradients: int = 1
    """Fewest gradients, replicas × micro-steps, of a step above the user's batch; 2 lets one replica measure noise."""

    def __post_init__(self) -> None:
        least = {"max_batch_size": 1, "local_min": 1, "local_max": self.local_min, "max_accumulation": 0}
        for name, bound in {**least, "min_gradients": 1}.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise InvalidArgument(f"{name} must be at least {bound}. Found: {value}")


class BatchChoice(NamedTuple):
    """A batch and what is predicted of it."""

    batch: int
    """Samples of a step, of all replicas. It may be a few less than replicas × micro-steps × `local_batch`: the user's
    batch is then shared as evenly as it can be."""
    local_batch: int
    """Samples per replica and micro-step, the most of any replica."""
    accumulation: int
    """Further micro-steps."""
    throughput: float
    """Samples per second."""
    efficiency: float
    """In (0, 1]."""
    goodput: float
    """Samples per second, as if of the user's batch."""


class PlacementSearch(NamedTuple):
    """The best of each placement; each (placements,)."""

    local_batch: Ints
    accumulation: Ints
    goodput: Floats


@dataclass(frozen=True)
class Goodput:
    """Predict goodput, and find the batch at which it is highest.

    Args:
        model: of the step time.
        noise: of the gradients.
        base_batch: M0, samples of a step as the user wrote it, ≥ 1.

    Example:
        >>> model = ThroughputModel(compute_fixed_s=0.01, compute_sample_s=0.001, ring_s=0.02)
        >>> goodput = Goodput(model, NoiseInterval(500.0, 400.0, 700.0), base_batch=64)
        >>> goodput.best(1, 1, BatchLimits(max_batch_size=1024)).batch
        71
        >>> goodput.best(2, 8, BatchLimits(max_batch_size=1024)).batch
        328
        >>> goodput.best(2, 8, BatchLimits(max_batch_size=1024), bound="low").batch
        296
    """

    model: ThroughputModel
    noise: NoiseInterval
    base_batch: int

    def __post_init__(self) -> None:
        if self.base_batch < 1:
            raise InvalidArgument(f"base_batch must be at least 1. Found: {self.base_batch}")

    def predict(
        self,
        nodes: ArrayLike,
        replicas: ArrayLike,
        local_batch: ArrayLike,
        accumulation: ArrayLike = 0,
        *,
        communication_scale: ArrayLike = 1.0,
        bound: Bound = "phi",
    ) -> Any:
        """Return the goodput of given configurations, samples per second as if of the user's batch.

        Args:
            nodes: hosts, ≥ 1; like all others a number or an array.
            replicas: ranks in all, ≥ nodes.
            local_batch: samples per replica and micro-step, > 0.
            accumulation: further micro-steps, ≥ 0.
            communication_scale: factor of the sync time, ≥ 0.
            bound: of the noise scale that is reckoned with.

        Returns:
            A float for numbers, an array of the broadcast shape for arrays.

        Raises:
            InvalidArgument: if an argument is out of its range, or a batch below the user's.
        """
        throughput = self.model.throughput(nodes, replicas, local_batch, accumulation, communication_scale)
        batch = np.asarray(replicas, float) * np.asarray(local_batch, float) * (np.asarray(accumulation, float) + 1)
        return throughput * self._efficiency(batch if np.ndim(batch) else float(batch), bound)

    def best(
        self,
        nodes: int,
        replicas: int,
        limits: BatchLimits | None = None,
        *,
        communication_scale: float = 1.0,
        bound: Bound = "phi",
    ) -> BatchChoice:
        """Return the batch of highest goodput; of equal ones that with the least accumulation.

        Args:
            nodes: hosts, ≥ 1.
            replicas: ranks in all, ≥ nodes.
            limits: of the batch; None keeps the user's.
            communication_scale: factor of the sync time, ≥ 0.
            bound: of the noise scale: "low" chooses cautiously.

        Raises:
            InvalidArgument: if no batch from the user's upwards is within the limits.
        """
        bounds = limits or BatchLimits()
        highest = self.search([nodes], [replicas], bounds, communication_scale=communication_scale, bound=bound)
        local, extra, goodput = int(highest.local_batch[0]), int(highest.accumulation[0]), float(highest.goodput[0])
        if not goodput > 0:
            raise InvalidArgument(
                f"no batch of {self.base_batch} samples or more is within the limits on {replicas} replicas: {bounds}; "
                "raise local_max, max_accumulation or max_batch_size, or take another number of replicas"
            )
        batch = min(replicas * local * (extra + 1), bounds.max_batch_size or self.base_batch)
        throughput = batch / self.model.step_s(nodes, replicas, local, extra, communication_scale)
        return BatchChoice(batch, local, extra, throughput, float(self._efficiency(float(batch), bound)), goodput)

    def search(
        self,
        nodes: ArrayLike,
        replicas: ArrayLike,
        limits: BatchLimits,
        *,
        communication_scale: float = 1.0,
        bound: Bound = "phi",
    ) -> PlacementSearch:
        """Return the best local batch and accumulation of many placements at once.

        Args:
            nodes: hosts of each placement (placements,).
            replicas: ranks of each (placements,).
            limits: of the batch.
            communication_scale: factor of the sync time, ≥ 0.
            bound: of the noise scale.

        Returns:
            Goodput is 0 where no batch is within the limits.
        """
        hosts, ranks = np.broadcast_arrays(np.asarray(nodes, np.int64), np.asarray(replicas, np.int64))
        if np.any(hosts < 1) or np.any(ranks < hosts):
            raise InvalidArgument(
                f"each placement must have 1 ≤ nodes ≤ replicas. Found: {ranks.min()} on {hosts.max()}"
            )
        most = max(limits.max_batch_size or self.base_batch, 0)
        extra = np.arange(limits.max_accumulation + 1)
        gradients = ranks[:, None] * (extra + 1)
        # The least local batch with which all ranks together have the user's batch.
        least = np.maximum(-(-self.base_batch // gradients), limits.local_min)
        largest = np.maximum(most // gradients, -(-self.base_batch // gradients))
        if limits.local_max is not None:
            largest = np.minimum(largest, limits.local_max)
        is_possible = (least <= largest) & (gradients <= most) & (most >= self.base_batch)

        def goodput_of(local: Ints) -> Floats:
            batch = np.minimum(gradients[..., None] * local, most)
            size = np.maximum(batch, self.base_batch)
            step = self.model.step_s(
                hosts[:, None, None], ranks[:, None, None], local, extra[:, None], communication_scale
            )
            is_measured = (size <= self.base_batch) | (gradients[..., None] >= limits.min_gradients)
            goodput: Floats = size / step * self._efficiency(size, bound)
            return np.where(is_measured & is_possible[..., None], goodput, 0.0)

        local, goodput = _highest(goodput_of, least, np.maximum(largest, least))
        # Of equal goodputs the first: the least accumulation. Rounding must not decide against it.
        row, column = (
            np.arange(len(ranks)),
            (goodput >= goodput.max(axis=1, keepdims=True) * (1 - 1e-12)).argmax(axis=1),
        )
        return PlacementSearch(local[row, column], extra[column], goodput[row, column])

    def _efficiency(self, batch: Any, bound: Bound) -> Any:
        return efficiency(batch, self.base_batch, self.noise.at(batch, bound))


def _highest(goodput_of: Callable[[Ints], Floats], low: Ints, high: Ints) -> tuple[Ints, Floats]:
    """Return the whole number in [low, high] with the highest goodput, and it; `goodput_of` takes (..., candidates).

    Goodput rises in the local batch up to one point and falls from there on, so the neighbours of the best candidate
    enclose it.
    """
    steps = np.linspace(0.0, 1.0, GRID)
    while (high - low >= GRID).any():
        spaced = np.round(low[..., None] * (high / low)[..., None] ** steps).astype(np.int64)
        local = np.clip(spaced, low[..., None], high[..., None])
        best = _take(local, goodput_of(local).argmax(axis=-1))[..., None]
        # Rounding makes some candidates equal.
        low = np.where(local < best, local, low[..., None]).max(axis=-1)
        high = np.where(local > best, local, high[..., None]).min(axis=-1)
    local = np.minimum(low[..., None] + np.arange(GRID), high[..., None])
    goodput = goodput_of(local)
    best = goodput.argmax(axis=-1)
    return _take(local, best), _take(goodput, best)


def _take(values: NDArray[Any], index: Ints) -> NDArray[Any]:
    """Return the element of the last dimension that an index of the others names."""
    return np.take_along_axis(values, index[..., None], axis=-1)[..., 0]
