"""What a policy knows of nodes and jobs, and what it answers with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from accel.errors import InvalidArgument
from accel.goodput.job import JobProfile

Allocation = Mapping[str, tuple[str, ...]]
"""Name of a job → the node of each of its replicas, those on one node side by side; a job that waits is left out."""


@dataclass(frozen=True)
class ClusterNode:
    """A host of the cluster.

    Args:
        name: of the node.
        gpus: slots for replicas, ≥ 1.
        kind: of its GPUs; a job's steps take another time on each kind.
        speed: of a GPU of this kind beside the others', > 0; reckoned with until a job has run on it.
        is_spot: whether it may be taken away at short notice.

    Raises:
        InvalidArgument: if a value is out of its range.
    """

    name: str
    gpus: int
    kind: str = "gpu"
    speed: float = 1.0
    is_spot: bool = False

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise InvalidArgument(f"a node must have at least 1 GPU. Found: {self.gpus} on {self.name}")
        if not 0 < self.speed < math.inf:
            raise InvalidArgument(f"speed must be positive and finite. Found: {self.speed} of {self.name}")


@dataclass(frozen=True, kw_only=True)
class JobView:
    """A job as a policy sees it: what was asked for, and what the job has found of itself so far.

    Args:
        name: of the job.
        submitted_s: when it was submitted, on the clock of the policy's `now_s`.
        profiles: by kind of GPU, what the job's own controller has fitted there; empty before its first steps.
        min_replicas: fewest replicas that it can run on, ≥ 1.
        max_replicas: most that it may be given, ≥ `min_replicas`.
        is_preemptible: whether its replicas may be moved or taken once it runs.
        service_s: GPU-seconds it has had.
        restarts: how often its replicas have been changed.
        weight: how much its speed counts beside the others', > 0.
        deadline_s: when it is wanted, on the clock of `now_s`; None for no deadline.

    Raises:
        InvalidArgument: if a value is out of its range.
    """

    name: str
    submitted_s: float
    profiles: Mapping[str, JobProfile]
    min_replicas: int = 1
    max_replicas: int = 64
    is_preemptible: bool = True
    service_s: float = 0.0
    restarts: int = 0
    weight: float = 1.0
    deadline_s: float | None = None

    @property
    def steps_left(self) -> float | None:
        """Base steps to its end, by the number of epochs that its script declares; None if it declares none."""
        known = [each for each in self.profiles.values() if each.total is not None]
        return min((max((each.total or 0.0) - each.progress, 0.0) for each in known), default=None)

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise InvalidArgument(
                "replicas must have 1 ≤ min_replicas ≤ max_replicas. "
                f"Found: {self.min_replicas} and {self.max_replicas} of {self.name}"
            )
        if not 0 < self.weight < math.inf:
            raise InvalidArgument(f"weight must be positive and finite. Found: {self.weight} of {self.name}")


Policy = Callable[[Sequence[JobView], Sequence[ClusterNode], Allocation, float], Mapping[str, tuple[str, ...]]]
"""Returns the nodes of each job's replicas; of jobs, nodes, what they have now, and the time in s."""
