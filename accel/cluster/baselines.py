"""The policies that others have published, as functions like `accel.cluster.policy.allocate`.

| policy | sizes | order |
|---|---|---|
| first come, first served | what was asked for | by submission; later ones wait for a larger one |
| Tiresias (Gu et al., NSDI 2019) | what was asked for | two queues, by GPU-seconds had; none waits for a larger one |
| Optimus (Peng et al., EuroSys 2018) | one more to whom it saves the most time | all at once |
| equal shares | the GPUs divided by the jobs | by submission |

Optimus is given an oracle, as Pollux's authors gave it one: the real step times and the real number of steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from accel.cluster.jobs import Allocation, ClusterNode, JobView
from accel.cluster.simulator import SimulatedJob

QUEUE_S = 16 * 3600
"""GPU-seconds after which Tiresias puts a job into its second queue."""


def first_come(
    jobs: Sequence[JobView], nodes: Sequence[ClusterNode], current: Allocation, now_s: float
) -> dict[str, tuple[str, ...]]:
    """Give each job what it asked for, in the order of submission; jobs that run are not stopped."""
    free = sum(node.gpus for node in nodes) - sum(map(len, current.values()))
    sizes = {name: len(given) for name, given in current.items()}
    for job in sorted(jobs, key=lambda each: each.submitted_s):
        if job.name in sizes:
            continue
        if job.max_replicas > free:
            break
        sizes[job.name] = job.max_replicas
        free -= job.max_replicas
    return _on_freest(sizes, nodes, current, sizes)


def equal_shares(
    jobs: Sequence[JobView], nodes: Sequence[ClusterNode], current: Allocation, now_s: float
) -> dict[str, tuple[str, ...]]:
    """Divide the GPUs evenly, in the order of submission; what a job can't use goes to the others."""
    free = sum(node.gpus for node in nodes)
    sizes: dict[str, int] = {}
    by_limit = sorted(jobs, key=lambda each: (each.max_replicas, each.submitted_s))
    for number, job in enumerate(by_limit):
        sizes[job.name] = min(job.max_replicas, -(-free // (len(jobs) - number)), free)
        free -= sizes[job.name]
    order = [job.name for job in sorted(jobs, key=lambda each: each.submitted_s) if sizes[job.name]]
    return _on_freest(sizes, nodes, current, order)


class Tiresias:
    """Two queues by attained service; it remembers in which order jobs went into the second."""

    def __init__(self) -> None:
        self._second: list[str] = []

    def __call__(
        self, jobs: Sequence[JobView], nodes: Sequence[ClusterNode], current: Allocation, now_s: float
    ) -> dict[str, tuple[str, ...]]:
        """Return the nodes of each job's replicas."""
        asked = {job.name: job.max_replicas for job in jobs}
        self._second = [name for name in self._second if name in asked]
        for job in jobs:
            if job.name in current and job.name not in self._second and job.service_s >= QUEUE_S:
                self._second.append(job.name)
        free, running = sum(node.gpus for node in nodes), []
        for name in [*(job.name for job in jobs if job.name not in self._second), *self._second]:
            if asked[name] <= free:
                running.append(name)
                free -= asked[name]
        return _on_freest(asked, nodes, current, running)


class Optimus:
    """One more replica at a time to the job whose remaining time it shortens most.

    Args:
        seconds_left: real seconds that a job needs on so many replicas.
    """

    def __init__(self, seconds_left: Callable[[str, int], float]) -> None:
        self._seconds_left = seconds_left

    def __call__(
        self, jobs: Sequence[JobView], nodes: Sequence[ClusterNode], current: Allocation, now_s: float
    ) -> dict[str, tuple[str, ...]]:
        """Return the nodes of each job's replicas."""
        free = sum(node.gpus for node in nodes)
        sizes: dict[str, int] = {}
        gains: dict[str, float] = {}
        most = {job.name: job.max_replicas for job in jobs}

        def gain(name: str) -> float:
            size = sizes[name]
            if size >= most[name] or free < 1:
                return 0.0
            return self._seconds_left(name, size) - self._seconds_left(name, size + 1)

        for job in jobs:
            sizes[job.name], gains[job.name] = int(free > 0), 0.0
            if free:
                free -= 1
                gains[job.name] = gain(job.name)
        while free > 0 and max(gains.values()) > 0:
            name = max(gains, key=lambda each: gains[each])
            sizes[name] += 1
            gains[name] = gain(name)
            free -= 1
        return _on_freest(sizes, nodes, current, [name for name in sorted(sizes, key=sizes.__getitem__) if sizes[name]])


def optimus_seconds(jobs: Mapping[str, SimulatedJob]) -> Callable[[str, int], float]:
    """Return Optimus's oracle for simulated jobs."""

    def seconds_left(name: str, replicas: int) -> float:
        job = jobs[name]
        application, batch = job.application, job.submission.batch_size
        last = application.epochs - 1
        steps = 1.0
        if last > job.epoch:
            steps = application.iterations(batch, last) - application.iterations(batch, job.epoch)
        most = application.local_bounds[1]
        shared = math.ceil(batch / replicas - 1e-8)
        extra = math.ceil(shared / most - 1e-8) - 1
        if replicas == 1:
            extra = max(1, extra)
        local = min(math.ceil(shared / (extra + 1) - 1e-8), application.max_batch // (replicas * (extra + 1)))
        whole, rest = divmod(replicas, 4)
        time = application.step_time((4,) * whole + ((rest,) if rest else ()), local)
        return (time.step_s + time.compute_s * extra) * steps

    return seconds_left


def _on_freest(
    sizes: Mapping[str, int],
    nodes: Sequence[ClusterNode],
    current: Allocation,
    order: Sequence[str] | Mapping[str, int],
) -> dict[str, tuple[str, ...]]:
    """Keep jobs whose size is unchanged; put the others, in an order, on the nodes with the most free GPUs."""
    kept = {name: current[name] for name in order if name in current and len(current[name]) == sizes[name]}
    placed = {name: kept[name] for name in current if name in kept}
    free = Counter({node.name: node.gpus for node in nodes})
    free -= Counter(name for given in kept.values() for name in given)
    for job in order:
        given: list[str] = list(placed.get(job, ()))
        while len(given) < sizes[job]:
            name, room = free.most_common(1)[0]
            count = min(room, sizes[job] - len(given))
            given += [name] * count
            free[name] -= count
        placed[job] = tuple(given)
    return placed
