"""Jobs as processes of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import torch

from accel.cluster.actuators import LOG, RESTARTS, SAVE_S, Status
from accel.cluster.job_table import JobRow
from accel.cluster.jobs import ClusterNode
from accel.elastic.local_job import LocalJob
from accel.errors import InvalidArgument
from accel.profiler.host import usable_cores
from accel.scores import CHECKPOINT

_LOOK_S = 0.1


class LocalActuator:
    """Run jobs as processes of this machine, each replica on a GPU of its own where there are GPUs.

    Args:
        slots: replicas that may run at once, ≥ 1.
        gpus: indices of the GPUs that replicas are put on, `slots` of them. Default: replicas run on the CPU.

    Raises:
        InvalidArgument: if there is no slot, or not one GPU for each.
    """

    def __init__(self, slots: int, gpus: tuple[int, ...] = ()) -> None:
        if slots < 1:
            raise InvalidArgument(f"slots must be at least 1. Found: {slots}")
        if gpus and len(gpus) != slots:
            raise InvalidArgument(f"slots must be as many as the GPUs given. Found: {slots} slots, {len(gpus)} GPUs")
        self._slots, self._gpus = slots, gpus
        self._jobs: dict[str, LocalJob] = {}
        self._held: dict[str, list[int]] = {}
        """GPUs of each job's processes."""
        self._restarts: dict[str, int] = {}
        """How often each job is still started again after one of its ranks has failed."""
        self._lost = set[str]()
        """Jobs that are to be."""
        self._lock = threading.Lock()

    def nodes(self) -> list[ClusterNode]:
        """Return this machine."""
        return [ClusterNode("localhost", self._slots)]

    def change(self, row: JobRow, nodes: tuple[str, ...]) -> None:
        """Let a job's processes be as many as it has nodes; those that stay go on where the job allows it."""
        if row.name in self._lost:
            self._lost.remove(row.name)
            del self._jobs[row.name]
        if (job := self._jobs.get(row.name)) is not None and not self._is_in_place(row):
            job.resize(0)
            if job.status is not None:
                return  # it has ended by itself meanwhile
            job = None
        if job is None:
            job = self._jobs[row.name] = self._made(row, len(nodes))
        job.resize(len(nodes))

    def _is_in_place(self, row: JobRow) -> bool:
        """Return whether processes go on when their number changes; each start may be on other GPUs."""
        return row.spec.in_place and not self._gpus

    def _made(self, row: JobRow, ranks: int) -> LocalJob:
        self._restarts.setdefault(row.name, RESTARTS)
        folder = Path(row.spec.checkpoint)
        return LocalJob(
            row.spec.arguments,
            folder,
            save_s=SAVE_S,
            variables=self._on_gpus(row.name, ranks),
            in_place=self._is_in_place(row),
            work_folder=row.spec.folder,
            output=folder / LOG,
        )

    def _on_gpus(self, name: str, replicas: int) -> dict[str, str]:
        """Choose GPUs for a job that has stopped; return the variable that puts it on them."""
        if not self._gpus:
            return {}
        with self._lock:
            self._held.pop(name, None)
            taken = {gpu for other, gpus in self._held.items() if self._jobs[other].ranks for gpu in gpus}
            self._held[name] = [gpu for gpu in self._gpus if gpu not in taken][:replicas]
            return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self._held[name]))}

    def status(self, name: str) -> Status:
        """Return the exit status of a job that has ended by itself; it is lost while it may be started again."""
        if (job := self._jobs.get(name)) is None:
            return None
        if job.status and name not in self._lost and self._restarts.get(name):
            self._restarts[name] -= 1
            job.resize(0)  # ends what is left of it
            self._lost.add(name)
        return "lost" if name in self._lost else job.status

    def recover(self, row: JobRow) -> bool:
        """End what an earlier scheduler has started of a job: its processes are nobody's children now."""
        end_processes(row.spec.checkpoint)
        return False


def on_this_machine(slots: int | None) -> LocalActuator:
    """Return what runs jobs on this machine.

    Args:
        slots: replicas at once; None for the number of GPUs, or of cores where there is none.

    Raises:
        InvalidArgument: if there are not so many GPUs.
    """
    gpus = tuple(range(torch.cuda.device_count()))
    most = slots or len(gpus) or usable_cores()
    if gpus and most > len(gpus):
        raise InvalidArgument(f"slots must be at most the number of GPUs, {len(gpus)}. Found: {most}")
    return LocalActuator(most, gpus[:most])


def end_processes(checkpoint: str) -> None:
    """Have the processes of a job save and end; kill those that don't in time.

    Args:
        checkpoint: folder of the job's checkpoints, by which they are known.
    """
    deadline = time.monotonic() + SAVE_S
    alive = processes_of(checkpoint)
    for each in alive.keys() - {child for child, parent in alive.items() if parent in alive}:
        _send(each, signal.SIGTERM)  # launchers; they tell their ranks
    while alive and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        alive = processes_of(checkpoint)
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
