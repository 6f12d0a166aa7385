"""The time of an optimizer step, by placement, batch and accumulation.

    compute = (fixed^p + (sample · m)^p)^(1/p)                          a micro-step of m samples per replica
    sync    = (1 - 1/K) · local_ring + log2 K · local_latency           K replicas; 0 if K = 1
            + (1 - 1/K) · (ring + [n = 2] two_nodes) + (1 - n/K) · shared_link + log2 n · latency       n > 1 nodes
    step    = s · compute + (compute^γ + (c · sync)^γ)^(1/γ)            s further micro-steps, communication scale c

The last line is that of Pollux (Qiao et al., OSDI 2021, https://www.usenix.org/conference/osdi21/presentation/qiao,
equations 8 to 11): γ = 1 if the gradients' exchange begins when all are there, large if it hides behind computation.
Pollux's compute is linear in m and its sync in K; here small batches are flat (p > 1), and sync saturates in K as rings
do. docs/goodput.md has the errors of both on measured profiles.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from accel.errors import InvalidArgument

Floats = NDArray[np.float64]

SYNC_TERMS = ("local_ring_s", "local_latency_s", "ring_s", "two_nodes_s", "shared_link_s", "latency_s")
"""Names of the times that `sync_terms` weighs, in its order."""
MOST = 10.0
"""Of both exponents: (1 + 1)^(1/10) is 7 % above the longer one of two times."""


@dataclass(frozen=True, kw_only=True)
class ThroughputModel:
    """Predict the time of optimizer steps; all times are in seconds, all ≥ 0.

    `accel.goodput.fit.fit` makes one from measured steps.

    Raises:
        InvalidArgument: if a parameter is out of its range.

    Example:
        >>> model = ThroughputModel(compute_fixed_s=0.01, compute_sample_s=0.001, ring_s=0.02)
        >>> round(model.step_s(nodes=1, replicas=1, local_batch=30), 3)
        0.04
        >>> model.step_s(nodes=2, replicas=2, local_batch=[30, 60]).round(3).tolist()
        [0.05, 0.08]
    """

    compute_fixed_s: float
    """Of a micro-step, whatever its batch: launches, weights read from memory."""
    compute_sample_s: float
    """Of a micro-step, for each sample."""
    compute_exponent: float = 1.0
    """p in [1, 10]: how sharply the fixed part hides the samples' part."""
    local_ring_s: float = 0.0
    """Sync of many replicas on one node: bytes over bandwidth."""
    local_latency_s: float = 0.0
    """Sync on one node, for each doubling of the replicas."""
    ring_s: float = 0.0
    """What many replicas on several nodes add: bytes over the network's bandwidth."""
    two_nodes_s: float = 0.0
    """What exactly two nodes add to that."""
    shared_link_s: float = 0.0
    """What replicas add that share a node's link."""
    latency_s: float = 0.0
    """For each doubling of the nodes."""
    overlap_exponent: float = 1.0
    """γ in [1, 10]: how well sync hides behind computation."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least, most = (1.0, MOST) if field.name.endswith("exponent") else (0.0, math.inf)
            if not (least <= value <= most and math.isfinite(value)):
                raise InvalidArgument(f"{field.name} must be in [{least:g}, {most:g}] and finite. Found: {value}")
        if self.compute_fixed_s + self.compute_sample_s <= 0:
            raise InvalidArgument("compute_fixed_s and compute_sample_s must not both be 0: a step takes time")

    def step_s(
        self,
        nodes: ArrayLike,
        replicas: ArrayLike,
        local_batch: ArrayLike,
        accumulation: ArrayLike = 0,
        communication_scale: ArrayLike = 1.0,
    ) -> Any:
        """Return the time of an optimizer step, s: a float for numbers, an array of the broadcast shape for arrays.

        Args:
            nodes: hosts, ≥ 1.
            replicas: ranks in all, ≥ nodes.
            local_batch: samples per replica and micro-step, > 0.
            accumulation: further micro-steps without synchronisation, ≥ 0.
            communication_scale: factor of the sync time, ≥ 0.

        Raises:
            InvalidArgument: if an argument is out of its range or not finite.
        """
        extra = _checked("accumulation", accumulation, 0.0)
        samples = np.log(_checked("local_batch", local_batch, 0.0, above=True))
        fixed, each = _log(self.compute_fixed_s), _log(self.compute_sample_s)
        sync = self._log_sync(nodes, replicas, communication_scale)
        log = log_step(fixed, each + samples, self.compute_exponent, sync, self.overlap_exponent, log_or_none(extra))
        arguments = (nodes, replicas, local_batch, accumulation, communication_scale)
        return np.exp(log) if any(np.ndim(argument) for argument in arguments) else float(np.exp(log))

    def _log_sync(self, nodes: ArrayLike, replicas: ArrayLike, communication_scale: ArrayLike) -> Floats:
        hosts, ranks = _checked("nodes", nodes, 1.0), _checked("replicas", replicas, 1.0)
        scale = _checked("communication_scale", communication_scale, 0.0)
        if np.any(ranks < hosts):
            raise InvalidArgument(
                f"replicas must be at least nodes, one on each. Found: {ranks.min():g} on {hosts.max():g}"
            )
        times = np.array([getattr(self, name) for name in SYNC_TERMS])
        sync: Floats = scale * (sync_terms(hosts, ranks) @ times)
        return log_or_none(sync)


def log_step(
    fixed: ArrayLike, samples: ArrayLike, p: ArrayLike, sync: ArrayLike, overlap: ArrayLike, extra: Floats
) -> Floats:
    """Return the logarithm of a step's time by those of its parts; `extra` counts micro-steps."""
    compute = power_sum(fixed, samples, p)
    log: Floats = np.logaddexp(power_sum(compute, sync, overlap), extra + compute)
    return log


def power_sum(log_x: ArrayLike, log_y: ArrayLike, exponent: ArrayLike) -> Floats:
    """Return the logarithm of (x^p + y^p)^(1/p), p ≥ 1: the sum of two times at p = 1, the longer one for large p.

    Args:
        log_x: logarithm of x, any shape. Logarithms throughout: times of 1e-9 s to the tenth power do not underflow.
        log_y: logarithm of y; -inf for no time.
        exponent: p.
    """
    p = np.asarray(exponent, float)
    log: Floats = np.logaddexp(p * np.asarray(log_x, float), p * np.asarray(log_y, float)) / p
    return log


def sync_terms(nodes: ArrayLike, replicas: ArrayLike) -> Floats:
    """Return the weights of the six sync times, (..., 6) in the order of `SYNC_TERMS`.

    A ring of K ranks sends 1 - 1/K of the bytes over each link; latencies grow with each doubling. What several hosts
    cost comes on top of what the ranks cost on one. Two hosts have a term of their own: on machines of 4 T4, sync of
    bert takes 1.5 s with 6 GPUs on 2 hosts and 0.7 s with 6 on 3, where NCCL can use trees. Ranks that share their
    host's link, 1 - nodes/K of all, wait for each other.

    Args:
        nodes: hosts, ≥ 1.
        replicas: ranks K in all, ≥ nodes.
    """
    n, k = np.broadcast_arrays(np.asarray(nodes, float), np.asarray(replicas, float))
    ring, several = 1.0 - 1.0 / k, n > 1
    columns: list[Any] = [
        ring,
        np.log2(k),
        ring * several,
        ring * (n == 2),
        (1.0 - n / k) * several,
        np.log2(n),
    ]
    return np.stack(columns, axis=-1)


def log_or_none(times: Floats) -> Floats:
    """Return the logarithm of times, -inf for those of 0."""
    log: Floats = np.log(times, where=times > 0, out=np.full(times.shape, -np.inf))
    return log


def _checked(name: str, value: ArrayLike, least: float, *, above: bool = False) -> Floats:
    numbers = np.asarray(value, float)
    is_in_range = np.isfinite(numbers) & ((numbers > least) if above else (numbers >= least))
    if not is_in_range.all():
        bound = f"{'above' if above else 'at least'} {least:g}"
        raise InvalidArgument(f"{name} must be {bound} and finite. Found: {numbers[~is_in_range].flat[0]:g}")
    return numbers


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
