"""What starts, resizes and stops the jobs that a scheduler shares out: the interface of all actuators.

| actuator | a replica is | module |
|---|---|---|
| `LocalActuator` | a process of this machine | `local_actuator` |
| `RayActuator` | a process on a node of a Ray cluster | `ray_actuator` |
| `KubernetesActuator` | a pod of an indexed Job | `kubernetes_actuator` |

A job's script, its checkpoints and the job table have the same paths on all nodes.
"""

from __future__ import annotations

from typing import Literal, Protocol

from accel.cluster.job_table import JobRow
from accel.cluster.jobs import ClusterNode
from accel.errors import AccelError

SAVE_S = 60.0
"""How long ranks may take for the step under way and their checkpoint."""
LOG = "accel-job.log"
"""File in a job's checkpoint folder that its output goes to."""
RESTARTS = 3
"""How often the ranks of a job are started again where they are after one of them was killed or has failed."""

Status = int | Literal["lost"] | None
"""Exit status of a job that has ended by itself; "lost" if a node took it away; None while it runs, or is stopped."""


class ClusterUnreachable(AccelError):
    """The cluster does not answer, which may pass: the scheduler asks again."""


class Actuator(Protocol):
    """What a scheduler acts through; `change` is called in threads, for one job by one at a time.

    All raise `ClusterUnreachable` while the cluster does not answer.
    """

    def nodes(self) -> list[ClusterNode]:
        """Return the nodes that are there."""

    def change(self, row: JobRow, nodes: tuple[str, ...]) -> None:
        """Give a job its replicas on nodes, or stop it for none, once its checkpoint is written; may take minutes."""

    def status(self, name: str) -> Status:
        """Return how a job ended, or that it was lost."""

    def recover(self, row: JobRow) -> bool:
        """Take over what an earlier scheduler has started of a job, and return True; or end it, after a checkpoint."""
