"""The loop's side of one worker process: its connection, its slots, the jobs it has."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import pickle
import signal
import time
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection
from socket import recv_fds, socket
from typing import Any

from accel.dataio.engine import worker
from accel.dataio.engine.engine import BatchJob
from accel.dataio.engine.slots import SlotReader

# The loop's ends of all connections: a process forked later must not keep them open, or a worker would not see that
# the loop is gone.
_ENDS: weakref.WeakSet[Connection | socket] = weakref.WeakSet()
_PROCESSES: weakref.WeakSet[Any] = weakref.WeakSet()
# A worker has so long to end on its own, and again after SIGTERM.
_ENDS_S = 1.0


def _forget_in_child() -> None:
    for end in list(_ENDS):
        end.close()
    # At its end a process terminates the daemons it knows of: those of its parent are not its own.
    for process in list(_PROCESSES):
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_forget_in_child)


class WorkerHandle:
    """One worker process; `start` may be called again when it is gone.

    Attributes:
        jobs: those it has, by serial number.
        slots: its shared memory, as the loop sees it.
        served: batches it has made.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.jobs: dict[int, BatchJob] = {}
        self.process: Any = None
        self.connection: Connection | None = None
        self._channel: socket | None = None
        self._begin()

    def _begin(self) -> None:
        self.slots, self.ready, self.served = SlotReader(), False, 0

    def start(self, context: Any, task: worker.Task) -> None:
        self._begin()
        ours, theirs = multiprocessing.Pipe(duplex=True)
        _ENDS.add(ours)
        name = f"accel-loader-{self.number}"
        # Known before it is started: if Ctrl-C comes between, there is somebody to end it.
        process = self.process = context.Process(target=worker.run, args=(theirs, task), name=name, daemon=True)
        self.connection = ours
        try:
            process.start()
        except Exception:
            ours.close()
            self.process = self.connection = None
            raise
        finally:
            theirs.close()
        self._channel = worker.channel_of(ours)
        _ENDS.add(self._channel)
        _PROCESSES.add(process)

    # -- messages ----------------------------------------------------------------------------------------------------

    def send(self, kind: str, content: Any) -> None:
        """Send an order; that the worker is gone, receiving will find out."""
        data = pickle.dumps((kind, content), protocol=pickle.HIGHEST_PROTOCOL)
        assert self.connection is not None
        try:
            self.connection.send_bytes(data)
        except OSError:
            return

    def give(self, serial: int, job: BatchJob) -> None:
        """Hand over a job; raises what pickle raises for indices that can't travel."""
        indices = pickle.dumps(job.indices, protocol=pickle.HIGHEST_PROTOCOL)
        self.jobs[serial] = job
        slots = self.slots.take_freed()
        self.send("order", worker.Order(serial, indices, job.seed, job.numbers, *slots))

    def receive(self) -> Iterator[Any]:
        """Yield the messages that have come; raises EOFError or OSError when the worker is gone."""
        while self.connection is not None and self.connection.poll():
            message = pickle.loads(self.connection.recv_bytes())
            if isinstance(message, worker.Done):
                for number in message.dropped:
                    self.slots.drop(number)
                if message.slot is not None and message.new_file:  # it comes after the message, with a byte of its own
                    assert self._channel is not None
                    files = recv_fds(self._channel, 1, 1)[1]
                    if not files:
                        raise EOFError
                    self.slots.add(message.slot, files[0])
            yield message

    # -- the end -----------------------------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """Close the connection: the worker then ends on its own, if it can."""
        for end in (self.connection, self._channel):
            if end is not None:
                end.close()

    def bury(self) -> str:
        """Clear away a worker that is gone; return which process it was and how it ended."""
        self.hang_up()
        self.process.join(_ENDS_S)
        description = f"worker process {self.number} (pid {self.process.pid}) {_how_it_ended(self.process.exitcode)}"
        self._end()
        return description

    def end(self, wait_s: float) -> None:
        """End the process, which has `wait_s` seconds to do so on its own."""
        if self.process is not None:
            if self.process.pid is not None:
                self.process.join(wait_s)
            self._end()

    def _end(self) -> None:
        if self.process.pid is None:  # never started
            self.process = None
            return
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(_ENDS_S)
        if self.process.is_alive():  # stopped, or deaf to SIGTERM
            self.process.kill()
            self.process.join()
        self.process.close()
        self.process = None


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "closed its connection"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def end_all(handles: list[WorkerHandle], owner: int) -> None:
    """End all workers of process `owner`: they see the connection close; one that is left after a second is killed."""
    mine, handles[:] = list(handles), []
    if os.getpid() != owner:
        return
    for handle in mine:
        handle.hang_up()
    deadline = time.monotonic() + _ENDS_S
    for handle in mine:
        handle.end(max(0.0, deadline - time.monotonic()))
