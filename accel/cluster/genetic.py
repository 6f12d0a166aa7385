"""Pollux's policy, told again from its paper: a genetic search for the allocation of highest fitness.

    fitness = (mean of (speed-up · restart factor)^p)^(1/p),   p = -1
    speed-up over a fair share of the GPUs;   restart factor = (age - restarts · restart_s) / (age + restart_s)

Qiao et al., OSDI 2021 (https://www.usenix.org/conference/osdi21/presentation/qiao), section 4.2. An individual is the
matrix of replicas, jobs by nodes. Parents exchange rows; entries are set at random, to 0, or back to what runs now.
What breaks a rule is repaired: too many replicas of a job or on a node, too few, two jobs of several nodes on one node.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from accel.cluster.jobs import Allocation, ClusterNode, JobView
from accel.goodput.goodput import SpeedTable
from accel.goodput.job import EXPLORED

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_LEAST = 1e-3


class Pollux:
    """A genetic search that begins with the last round's population.

    Args:
        population: individuals.
        generations: of a round.
        seed: of the random numbers.

    It takes nodes of one kind and one size, as its authors' does.
    """

    def __init__(self, population: int = 100, generations: int = 100, seed: int = 0) -> None:
        self._size, self._generations = population, generations
        self._draw = np.random.default_rng(seed)
        self._last: list[dict[str, dict[str, int]]] = []
        """Population of the last round: by individual, job and node."""

    def __call__(
        self, jobs: Sequence[JobView], nodes: Sequence[ClusterNode], current: Allocation, now_s: float
    ) -> dict[str, tuple[str, ...]]:
        """Return the nodes of each job's replicas."""
        ordered = sorted(jobs, key=lambda job: (job.service_s, job.submitted_s))
        names = [node.name for node in nodes]
        base = _matrix(
            {name: {node: given.count(node) for node in given} for name, given in current.items()}, ordered, names
        )
        gpus = np.array([node.gpus for node in nodes])
        bounds = np.array([(job.min_replicas, job.max_replicas) for job in ordered]).T
        speed = _speeds(ordered, len(nodes), int(gpus.sum()))
        factors = _restart_factors(ordered, now_s)

        def fitness(states: Ints) -> Floats:
            ups = speed[np.arange(len(ordered)), (states > 0).sum(2), states.sum(2)]
            ups = ups * np.where((states != base).any(2), factors, 1.0)
            return np.asarray(1 / np.mean(1 / (ups + _LEAST), axis=1))

        states = np.stack([base, *(_matrix(each, ordered, names) for each in self._last)])
        states = self._repaired(states, gpus, bounds)
        for _ in range(self._generations):
            children = self._children(states, base, gpus)
            states = np.concatenate([states, self._repaired(children, gpus, bounds)])
            states = states[np.argsort(-fitness(states), kind="stable")[: self._size]]
        self._last = [_by_name(state, ordered, names) for state in states]
        best = self._last[0]
        return {
            job: tuple(name for name in names for _ in range(given.get(name, 0)))
            for job, given in best.items()
            if given
        }

    def _children(self, states: Ints, base: Ints, gpus: Ints) -> Ints:
        """Return as many children as a population has."""
        draw, jobs = self._draw, base.shape[0]
        first, second = (states[draw.integers(len(states), size=self._size)] for _ in range(2))
        from_first = np.arange(jobs) < draw.integers(jobs + 1, size=(self._size, 1))
        children = np.where(from_first[:, :, None], first, second)
        children = np.where(draw.random((self._size, jobs, 1)) < 0.1, base, children)
        cleared = np.where(draw.random((self._size, jobs, 1)) < 0.1, 0.1, 0.0)
        children = np.where(draw.random(children.shape) < cleared, 0, children)
        is_free = (children.sum(1) < gpus)[:, None, :]
        share = 1.0 / np.maximum(is_free.sum((1, 2), keepdims=True) * jobs, 1)
        own = (children > 0) & is_free
        grows = draw.random(children.shape) < is_free * share + own / np.maximum(own.sum((1, 2), keepdims=True), 1)
        return np.where(grows, draw.integers(children, gpus + 1), children)

    def _repaired(self, states: Ints, gpus: Ints, bounds: Ints) -> Ints:
        """Return states without what breaks a rule; which replicas go is drawn."""
        is_linked = ((states > 0).sum(2) > 1)[:, :, None] & (states > 0)
        states = np.where(is_linked & (is_linked.cumsum(1) > 1), 0, states)
        order = self._draw.random(states.shape).argsort(2)
        shuffled = np.minimum(np.take_along_axis(states, order, 2).cumsum(2), bounds[1][:, None])
        states = np.take_along_axis(np.diff(shuffled, axis=2, prepend=0), order.argsort(2), 2)
        states = np.diff(np.minimum(states.cumsum(1), gpus), axis=1, prepend=0)
        return np.where(states.sum(2, keepdims=True) >= bounds[0][:, None], states, 0)


def _speeds(jobs: Sequence[JobView], nodes: int, gpus: int) -> Floats:
    """Return speed-ups over a fair share (jobs, nodes, replicas)."""
    table = np.zeros((len(jobs), nodes + 1, gpus + 1))
    replicas, hosts = np.arange(gpus + 1), np.arange(nodes + 1)
    fair = max(-(-gpus // len(jobs)), 1)
    for own, job in zip(table, jobs, strict=True):
        profile = next(iter(job.profiles.values()), None)
        if profile is None:
            own[1:] = replicas / fair
            continue
        most = min(EXPLORED * profile.most_replicas, gpus)
        pairs = np.array([(n, k) for n in hosts[1:] for k in replicas[1:] if n <= k <= most] + [(1, 1)])
        shared = min(fair, most)
        pairs = np.append(pairs, [(min(-(-nodes // len(jobs)), shared), shared)], axis=0)
        by = SpeedTable(profile.model, profile.base_batch, profile.limits, pairs[:, 0], pairs[:, 1])
        rates = by.best(profile.noise).rate
        own[pairs[:-2, 0], pairs[:-2, 1]] = rates[:-2] / max(rates[-1], 1e-12)
        own[:, most + 1 :] = own[:, most : most + 1]
    return table


def _restart_factors(jobs: Sequence[JobView], now_s: float) -> Floats:
    """Return by how much a change of each job's replicas lowers its speed-up."""
    factors = []
    for job in jobs:
        restart_s = max((profile.restart_s for profile in job.profiles.values()), default=0.0)
        age = now_s - job.submitted_s
        factors.append(max(age - job.restarts * restart_s, 0.0) / max(age + restart_s, 1e-9) if restart_s else 1.0)
    return np.array(factors)


def _matrix(given: dict[str, dict[str, int]], jobs: Sequence[JobView], nodes: Sequence[str]) -> Ints:
    return np.array([[given.get(job.name, {}).get(node, 0) for node in nodes] for job in jobs], np.int64)


def _by_name(state: Ints, jobs: Sequence[JobView], nodes: Sequence[str]) -> dict[str, dict[str, int]]:
    return {
        job.name: {node: count for node, count in zip(nodes, row.tolist(), strict=True) if count}
        for job, row in zip(jobs, state, strict=True)
    }
