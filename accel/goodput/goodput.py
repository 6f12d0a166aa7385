"""Goodput: samples per second times what a sample is worth, and the batch at which it is highest.

    goodput(K) = max over M of  M / step(K, M) · efficiency(M),      M0 ≤ M ≤ the job's limit

K replicas, M0 the batch of the user. Step times are tabulated over batches once; what depends on the noise alone is
multiplied in afterwards, so that a job whose noise moves from step to step costs a scheduler some microseconds. Pollux,
https://www.usenix.org/conference/osdi21/presentation/qiao, equation 4.

Accumulation never pays by itself: with p-norms for both sums, one micro-step of (s + 1) m is at most as long as s + 1
of m. So it is the least that memory allows, or that one replica needs to measure the noise by two gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from accel.errors import InvalidArgument
from accel.goodput.efficiency import Bound, NoiseInterval, efficiency
from accel.goodput.throughput import Floats, ThroughputModel

Ints = NDArray[np.int64]

BATCHES = 50
"""That are compared; 10 % apart over two orders of magnitude."""


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


class Speeds(NamedTuple):
    """The best of each placement; each (placements,)."""

    rate: Floats
    """Base steps per second; 0 where the job can't run."""
    local_batch: Ints
    accumulation: Ints


class SpeedTable:
    """Step times of a job over placements and batches.

    Args:
        model: of the step time.
        base_batch: samples of a step as the user wrote it, ≥ 1.
        limits: of the batch.
        nodes: hosts of each placement (placements,), ≥ 1.
        replicas: ranks of each (placements,), ≥ nodes.

    Raises:
        InvalidArgument: if a placement has more nodes than replicas, or none.

    Example:
        >>> model = ThroughputModel(compute_fixed_s=0.01, compute_sample_s=0.001, ring_s=0.02)
        >>> table = SpeedTable(model, 64, BatchLimits(max_batch_size=1024), nodes=[1, 2], replicas=[1, 8])
        >>> (table.best(NoiseInterval(500.0, 400.0, 700.0)).local_batch * [1, 8]).tolist()
        [72, 336]
    """

    def __init__(
        self, model: ThroughputModel, base_batch: int, limits: BatchLimits, nodes: ArrayLike, replicas: ArrayLike
    ) -> None:
        self._base = base_batch
        hosts, ranks = (np.asarray(values, np.int64)[:, None] for values in (nodes, replicas))
        if np.any(hosts < 1) or np.any(ranks < hosts):
            raise InvalidArgument(
                f"each placement must have 1 ≤ nodes ≤ replicas. Found: {ranks.min()} replicas, {hosts.max()} nodes"
            )
        most = max(limits.max_batch_size or self._base, self._base)
        local_most = limits.local_max or most
        least = np.minimum(np.maximum(self._base, limits.local_min * ranks), most)
        spaced = np.rint(least * (most / least) ** np.linspace(0.0, 1.0, BATCHES)).astype(np.int64)
        shared = -(-spaced // ranks)
        extra = -(-shared // local_most) - 1
        needed = -(-limits.min_gradients // ranks) - 1
        extra = np.where(spaced > self._base, np.maximum(extra, needed), extra)
        self._local = -(-shared // (extra + 1))
        self._local = np.where(ranks * (extra + 1) * self._local > most, most // (ranks * (extra + 1)), self._local)
        self._extra = extra
        self._batch = ranks * (extra + 1) * self._local
        can = (self._local >= limits.local_min) & (self._local <= local_most) & (extra <= limits.max_accumulation)
        can &= self._batch >= self._base
        step = model.step_s(hosts, ranks, np.maximum(self._local, 1), extra)
        self._per_s = np.where(can, self._batch / self._base / step, 0.0)
        self._sizes = np.maximum(self._batch, self._base).astype(float)

    def best(self, noise: NoiseInterval, bound: Bound = "phi") -> Speeds:
        """Return the best batch of each placement at a noise scale, or at an end of its interval."""
        rates = self._per_s * efficiency(self._sizes, self._base, noise.at(self._sizes, bound))
        at = rates.argmax(axis=1)
        rows = np.arange(len(at))
        return Speeds(rates[rows, at], self._local[rows, at], self._extra[rows, at])
