"""How fast a job would be on so many replicas: its own model of the step time, tabulated over batches once.

    goodput(K) = max over M of  M / step(K, M) · efficiency(M),      M0 ≤ M ≤ the job's limit

What depends on the noise alone is multiplied in afterwards, so that a job whose noise moves from step to step costs a
scheduler some microseconds. Accumulation is the least that memory allows: it never pays by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from accel.goodput.efficiency import NoiseInterval, efficiency
from accel.goodput.goodput import BatchLimits
from accel.goodput.throughput import ThroughputModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BATCHES = 50
"""That are compared; 10 % apart over two orders of magnitude."""


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
    """

    def __init__(
        self, model: ThroughputModel, base_batch: int, limits: BatchLimits, nodes: ArrayLike, replicas: ArrayLike
    ) -> None:
        self._base = base_batch
        hosts, ranks = (np.asarray(values, np.int64)[:, None] for values in (nodes, replicas))
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

    def best(self, noise: NoiseInterval) -> Speeds:
        """Return the best batch of each placement at a noise scale."""
        rates = self._per_s * efficiency(self._sizes, self._base, noise.at(self._sizes))
        at = rates.argmax(axis=1)
        rows = np.arange(len(at))
        return Speeds(rates[rows, at], self._local[rows, at], self._extra[rows, at])
