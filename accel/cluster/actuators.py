"""What starts, resizes and stops the jobs that a scheduler shares out: one interface, and this machine's processes.

| method | must |
|---|---|
| `nodes` | say which nodes are there now |
| `change` | give a job its replicas on nodes, or stop it for none, once its checkpoint is written; may take minutes |
| `status` | say how a job ended; None while it runs, is stopped, or was never started |
| `end_left` | end what an earlier scheduler has left of a job, after a checkpoint |
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Protocol

from accel.cluster.job_table import JobRow
from accel.cluster.jobs import ClusterNode
from accel.elastic.local_job import CHECKPOINT, LocalJob
from accel.errors import InvalidArgument

SAVE_S = 60.0
"""How long ranks may take for the step under way and their checkpoint."""
_LOOK_S = 0.1
LOG = "accel-job.log"
"""File in a job's checkpoint folder that its output goes to."""


class Actuator(Protocol):
    """What a scheduler acts through; `change` is called in threads, for one job by one at a time."""

    def nodes(self) -> list[ClusterNode]:
        """Return the nodes that are there."""

    def change(self, row: JobRow, nodes: tuple[str, ...]) -> None:
        """Start a job on nodes, move it there, or stop it for none; returns when that is done."""

    def status(self, name: str) -> int | None:
        """Return the exit status of a job that has ended by itself."""

    def end_left(self, row: JobRow) -> None:
        """End what an earlier scheduler has left of a job."""


class LocalActuator:
    """Run jobs as processes of this machine.

    Args:
        slots: replicas that may run at once, ≥ 1.

    Raises:
        InvalidArgument: if there is no slot.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise InvalidArgument(f"slots must be at least 1. Found: {slots}")
        self._slots = slots
        self._jobs: dict[str, LocalJob] = {}

    def nodes(self) -> list[ClusterNode]:
        """Return this machine."""
        return [ClusterNode("localhost", self._slots)]

    def change(self, row: JobRow, nodes: tuple[str, ...]) -> None:
        """Resize a job's processes."""
        job = self._jobs.get(row.name)
        if job is None:
            folder = Path(row.spec.checkpoint)
            job = self._jobs[row.name] = LocalJob(
                row.spec.arguments,
                folder,
                save_s=SAVE_S,
                work_folder=row.spec.folder,
                output=folder / LOG,
            )
        job.resize(len(nodes))

    def status(self, name: str) -> int | None:
        """Return the exit status of a job that has ended by itself."""
        return self._jobs[name].status if name in self._jobs else None

    def end_left(self, row: JobRow) -> None:
        """Have what an earlier scheduler has started save and end; kill what doesn't."""
        deadline = time.monotonic() + SAVE_S
        alive = processes_of(row.spec.checkpoint)
        for each in alive.keys() - {child for child, parent in alive.items() if parent in alive}:
            _send(each, signal.SIGTERM)  # launchers; they tell their ranks
        while alive and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            alive = processes_of(row.spec.checkpoint)
        for each in alive:
            _send(each, signal.SIGKILL)


def processes_of(checkpoint: str) -> dict[int, int]:
    """Return the processes that a job's launchers have started, and they themselves, each with its parent.

    They are known by the variable that names the checkpoint's folder, so nothing has to be written down before they
    begin. Where the system has no /proc, none is known.
    """
    mark = f"{CHECKPOINT}={checkpoint}".encode()
    alive = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    alive[int(folder.name)] = int(parent)
    return alive


def _send(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
