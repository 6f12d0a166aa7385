"""The two forms that the step-time model is made of, with what its fit needs of them.

    power sum   (x^p + y^p)^(1/p), p ≥ 1: the sum of two times at p = 1, the longer one for large p
    sync terms  what an all-reduce costs on `nodes` hosts with `replicas` ranks, linear in six times

Everything is computed from logarithms: times of 1e-9 s to the tenth power do not underflow, and a time of 0 s is -inf.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

SYNC_TERMS = ("local_ring_s", "local_latency_s", "ring_s", "two_nodes_s", "shared_link_s", "latency_s")
"""Names of the times that `sync_terms` weighs, in its order."""


class PowerSum(NamedTuple):
    """The logarithm of a power sum and its derivatives; all of one shape."""

    log: Floats
    """log (x^p + y^p)^(1/p)."""
    by_log_x: Floats
    """Its derivative by log x, in [0, 1]; that by log y is what is left to 1."""
    by_log_y: Floats
    by_exponent: Floats
    """Its derivative by p, ≤ 0."""


def power_sum(log_x: ArrayLike, log_y: ArrayLike, exponent: ArrayLike) -> PowerSum:
    """Return the power sum of two times, by their logarithms.

    Args:
        log_x: any shape, finite.
        log_y: of a shape that broadcasts with it; -inf for no time.
        exponent: p ≥ 1.
    """
    x, y = np.asarray(log_x, float), np.asarray(log_y, float)
    p = np.asarray(exponent, float)
    log = np.logaddexp(p * x, p * y) / p
    by_x, by_y = np.exp(p * (x - log)), np.exp(p * (y - log))
    # 0 · log 0 is 0: no time takes no part.
    mean = by_x * np.where(by_x > 0, x, 0.0) + by_y * np.where(by_y > 0, y, 0.0)
    return PowerSum(log, by_x, by_y, (mean - log) / p)


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
    ring = 1.0 - 1.0 / k
    several = n > 1
    columns: list[Any] = [
        ring,
        np.log2(k),
        ring * several,
        ring * (n == 2),
        (1.0 - n / k) * several,
        np.log2(n),
    ]
    return np.stack(columns, axis=-1)
