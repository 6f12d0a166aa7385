"""Fetch batches in worker processes that live as long as the loader does.

Each worker has one socket and no locks or queues in common with others: one that is killed takes nothing with it. What
it was making is made again by a successor; a batch that kills two workers is reported, with the samples in it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import selectors
import signal
import threading
import time
import weakref
from collections import deque
from multiprocessing.connection import Connection
from socket import AF_UNIX, SOCK_STREAM, recv_fds, socket
from typing import Any

from torch.utils.data import DataLoader

from accel.dataio import wire, worker
from accel.dataio.engine import Job, WorkerDied, as_raised
from accel.dataio.fetch import blame, fetch_of
from accel.dataio.mirror import Path
from accel.dataio.slots import MOST_HELD, SlotReader

log = logging.getLogger("accel.dataio")

_MOST_TRIES = 2
_WARN_S = 60.0
# The loop's ends of all connections: a process forked later must not keep them open, or a worker would not hear that
# the loop is gone.
_ENDS: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_ends() -> None:
    for end in list(_ENDS):
        end.close()


os.register_at_fork(after_in_child=_close_ends)


class _Handle:
    """The loop's side of one worker process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: Any = None
        self.connection: Connection | None = None
        self.slots = SlotReader()
        self.jobs: dict[int, Job] = {}
        self.ready = False
        self.served = 0
        self.threads_at_start = 1

    def send(self, kind: str, content: Any) -> bool:
        """Send an order; False if the worker is gone, which receiving will find out."""
        assert self.connection is not None
        try:
            self.connection.send_bytes(pickle.dumps((kind, content), protocol=pickle.HIGHEST_PROTOCOL))
        except OSError:
            return False
        return True

    def receive(self) -> Any:
        """Return the next message; raises EOFError or OSError when the worker is gone."""
        assert self.connection is not None
        message = pickle.loads(self.connection.recv_bytes())
        if isinstance(message, worker.Done):
            for number in message.dropped:
                self.slots.drop(number)
            if message.new_file:
                with socket(AF_UNIX, SOCK_STREAM, fileno=os.dup(self.connection.fileno())) as channel:
                    _, files, _, _ = recv_fds(channel, 1, 1)
                if not files:
                    raise EOFError
                assert message.slot is not None
                self.slots.add(message.slot, files[0])
        return message


class ProcessEngine:
    """Make batches of `loader` in `workers` processes; see `accel.dataio.engine.Engine`.

    Args:
        loader: map-style loader; its dataset, collate function, worker_init_fn and time-out are used.
        workers: processes, at least 1.
        start_method: "fork", "forkserver" or "spawn"; None for the loader's own context, or the system's default.
        prefetch: batches each worker may be ahead, default 2.
        threads: threads of an operation inside a worker, default 1, as in `DataLoader`.
        stall_s: after so many seconds (default 30) without its first batch, a worker that was forked while other
            threads ran is taken for stuck on a lock that was copied locked, and replaced by one that is not forked.

    Raises:
        ValueError: if a number is less than 1 or the start method is unknown here.
    """

    copies = True

    def __init__(
        self,
        loader: DataLoader[Any],
        workers: int,
        *,
        start_method: str | None = None,
        prefetch: int = 2,
        threads: int = 1,
        stall_s: float = 30.0,
    ) -> None:
        for name, value in (("workers", workers), ("prefetch", prefetch), ("threads", threads)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._loader = loader
        self._context = _context(loader, start_method)
        self.start_method: str = self._context.get_start_method()
        self.workers, self.capacity = workers, workers * prefetch
        self._threads, self._stall_s, self._timeout_s = threads, stall_s, float(loader.timeout)
        self._handles: list[_Handle] = []
        self._selector = selectors.DefaultSelector()
        self._order: deque[int] = deque()
        # With the slots of the worker that made it: a successor has its own.
        self._results: dict[int, tuple[int, SlotReader, Any]] = {}
        self._tries: dict[int, int] = {}
        self._leaves: dict[Path, Any] = {}
        self._next = 0
        self._owner = os.getpid()
        self.base_seed = 0
        self.deaths: list[str] = []
        """What became of workers that died; the loop went on."""
        self._finalizer = weakref.finalize(self, _shut, self._handles, os.getpid())

    # -- jobs --------------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Hand a job to the worker that has the fewest."""
        self.start()
        serial, self._next = self._next, self._next + 1
        self._order.append(serial)
        handle = min(self._handles, key=lambda each: len(each.jobs))
        self._give(handle, serial, job)

    def collect(self) -> Any:
        """Return the batch of the oldest job; raises what fetching it raised."""
        serial = self._order[0]
        self._await(serial)
        self._order.popleft()
        self._tries.pop(serial, None)
        number, slots, message = self._results.pop(serial)
        if isinstance(message, BaseException):
            raise message
        if isinstance(message, worker.Failed):
            raise as_raised(message.error, message.text, f"worker process {number} while fetching {message.at}")
        return _open(slots, message)

    def discard(self) -> None:
        """Forget all jobs that were not collected."""
        for _, slots, message in self._results.values():
            if isinstance(message, worker.Done) and message.slot is not None:
                slots.free_at_once(message.slot)
        self._order.clear()
        self._results.clear()
        self._tries.clear()
        for handle in self._handles:
            handle.jobs.clear()
            handle.send("stale", self._next)

    def update(self, leaves: dict[Path, Any]) -> None:
        """Set values in the workers' copies of the dataset, for the jobs submitted from now on."""
        self._leaves.update(leaves)
        for handle in self._handles:
            handle.send("dataset", leaves)

    def restart(self) -> None:
        """End the workers; the next job starts new ones, with the dataset as it is then."""
        self.discard()
        self._leaves = {}
        _shut(self._handles, self._owner)
        self._selector.close()
        self._selector = selectors.DefaultSelector()

    def close(self) -> None:
        """End the workers."""
        self.restart()

    # -- starting ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the workers, if there are none."""
        if self._handles:
            return
        if os.getpid() != self._owner:  # a copy of the loader in a forked process: workers of its own
            self._owner = os.getpid()
            self._finalizer = weakref.finalize(self, _shut, self._handles, self._owner)
            self._selector = selectors.DefaultSelector()
        for number in range(self.workers):
            handle = _Handle(number)
            self._handles.append(handle)
            self._start(handle, self._context)

    def _start(self, handle: _Handle, context: Any) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=True)
        _ENDS.add(ours)
        loader = self._loader
        # A worker may hold as many free slots as it can have jobs, and one for the batch in the loop's hands.
        task = worker.Task(
            handle.number,
            self.workers,
            fetch_of(loader),
            loader.worker_init_fn,
            self.base_seed,
            self._threads,
            most_free=self.capacity // self.workers + 2,
        )
        name = f"accel-loader-{handle.number}"
        process = context.Process(target=worker.run, args=(theirs, task), name=name, daemon=True)
        handle.threads_at_start = threading.active_count()
        try:
            process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        handle.process, handle.connection = process, ours
        handle.ready, handle.served, handle.slots = False, 0, SlotReader()
        self._selector.register(ours, selectors.EVENT_READ, handle)
        if self._leaves:
            handle.send("dataset", self._leaves)

    def _give(self, handle: _Handle, serial: int, job: Job) -> None:
        handle.jobs[serial] = job
        handle.send("order", worker.Order(serial, job.indices, job.seed, handle.slots.take_freed()))

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _await(self, serial: int) -> None:
        began = warned = time.monotonic()
        while serial not in self._results:
            for key, _ in self._selector.select(0.5):
                self._hear(key.data)
            waited = time.monotonic() - began
            if serial in self._results or waited < 1.0:
                continue
            self._look_for_dead()
            holder = next((h for h in self._handles if serial in h.jobs), None)
            if holder is not None and self._stuck(holder, waited):
                self._replace_forked(holder)
            elif self._timeout_s and waited > self._timeout_s:
                raise RuntimeError(self._late(serial, waited))
            elif time.monotonic() - warned > _WARN_S and holder is not None:
                warned = time.monotonic()
                holder.send("where", None)

    def _hear(self, handle: _Handle) -> None:
        try:
            message = handle.receive()
        except (EOFError, OSError):
            self._died(handle)
            return
        if isinstance(message, worker.Ready):
            handle.ready = True
        elif isinstance(message, worker.Where):
            log.warning(
                "worker process %d has been at one batch for over %.0f s; it is here:\n%s",
                handle.number,
                _WARN_S,
                message.stack,
            )
        elif isinstance(message, worker.Failed) and message.serial is None:
            self.restart()
            raise as_raised(message.error, message.text, f"worker process {handle.number} in {message.at}")
        elif message.serial in handle.jobs:
            del handle.jobs[message.serial]
            handle.served += 1
            self._results[message.serial] = (handle.number, handle.slots, message)
        elif isinstance(message, worker.Done) and message.slot is not None:
            handle.slots.free_at_once(message.slot)  # it was given up meanwhile

    # -- failures ----------------------------------------------------------------------------------------------------

    def _look_for_dead(self) -> None:
        for handle in self._handles:
            if not handle.process.is_alive() and not handle.connection.poll():  # type: ignore[union-attr]
                self._died(handle)

    def _died(self, handle: _Handle) -> None:
        """Put a new worker in the place of one that is gone; a batch that was begun twice is given up."""
        self._unlink(handle)
        handle.process.join(5)
        how = _how_it_ended(handle.process.exitcode)
        jobs, handle.jobs = handle.jobs, {}
        first = next(iter(jobs), None)
        what = "at its start" if first is None else f"while fetching {blame(RuntimeError(), jobs[first].indices)}"
        told = f"worker process {handle.number} (pid {handle.process.pid}) {how} {what}"
        self.deaths.append(told)
        if first is not None:
            self._tries[first] = self._tries.get(first, 0) + 1
            if self._tries[first] >= _MOST_TRIES:
                error = WorkerDied(
                    f"{told}; so did the worker before it. Often memory ran out, or the samples crash native code: "
                    "fetch these samples in the main process to see, or use fewer workers."
                )
                self._results[first] = (handle.number, handle.slots, error)
                del jobs[first]
        elif not handle.ready and len(self.deaths) > 2 * self.workers:
            self.restart()
            raise WorkerDied(f"{told}; no worker process can be started")
        log.warning("%s; a new one takes its place", told)
        self._start(handle, self._context)
        for serial, job in jobs.items():
            self._give(handle, serial, job)

    def _unlink(self, handle: _Handle) -> None:
        assert handle.connection is not None
        self._selector.unregister(handle.connection)
        handle.connection.close()

    def _stuck(self, handle: _Handle, waited: float) -> bool:
        forked = self.start_method == "fork" and handle.threads_at_start > 1
        return forked and handle.served == 0 and waited > self._stall_s

    def _replace_forked(self, handle: _Handle) -> None:
        """Start afresh without fork: the worker waits for a lock that a thread of the loop held when it was forked."""
        told = (
            f"worker process {handle.number} has not made its first batch in {self._stall_s:g} s; it was forked while "
            f"{handle.threads_at_start} threads ran, so it probably waits for a lock that no thread of it can release"
        )
        try:
            pickle.dumps(fetch_of(self._loader))
        except Exception as error:
            self.restart()
            raise WorkerDied(
                f"{told}. It can't be started without fork either, since the dataset can't be pickled ({error}). "
                "Start the loader before other threads, or make the dataset picklable."
            ) from error
        log.warning("%s; starting again by forkserver", told)
        self.deaths.append(told)
        jobs = {serial: job for each in self._handles for serial, job in each.jobs.items()}
        handles = list(self._handles)
        for each in handles:
            self._unlink(each)
            each.process.kill()
            each.process.join()
            each.jobs = {}
        self._context, self.start_method = _context(self._loader, "forkserver"), "forkserver"
        for each in handles:
            self._start(each, self._context)
        for serial in sorted(jobs):
            self._give(min(handles, key=lambda one: len(one.jobs)), serial, jobs[serial])

    def _late(self, serial: int, waited: float) -> str:
        for handle in self._handles:
            if serial in handle.jobs:
                what = blame(RuntimeError(), handle.jobs[serial].indices)
                limit = f"timeout={self._timeout_s:g}"
                return f"worker process {handle.number} has been fetching {what} for {waited:.0f} s ({limit})"
        return f"no worker has the batch after {waited:.0f} s"


def _open(slots: SlotReader, message: worker.Done) -> Any:
    memory: Any = message.data
    if message.slot is not None:
        memory = slots.view(message.slot)
        if slots.held > MOST_HELD:
            # The loop keeps its batches: they get memory of their own, so that the slot comes back.
            memory = bytearray(memory)
    return wire.load(message.payload, message.places, memory)


def _context(loader: DataLoader[Any], start_method: str | None) -> Any:
    if start_method is None:
        return loader.multiprocessing_context or multiprocessing.get_context()
    if start_method not in multiprocessing.get_all_start_methods():
        known = ", ".join(multiprocessing.get_all_start_methods())
        raise ValueError(f"start_method must be one of {known} on this system, got {start_method!r}")
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        # Paid once, by the server, instead of by every worker: importing torch takes seconds.
        context.set_forkserver_preload(["__main__", "accel.dataio.worker"])
    return context


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "closed its connection"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _shut(handles: list[_Handle], owner: int) -> None:
    """End all workers: they hear that the connection is closed; who doesn't hear within a second is terminated."""
    mine, handles[:] = list(handles), []
    if os.getpid() != owner:
        return
    for handle in mine:
        if handle.connection is not None:
            handle.connection.close()
    deadline = time.monotonic() + 1.0
    for handle in mine:
        if handle.process is None:
            continue
        handle.process.join(max(0.0, deadline - time.monotonic()))
        if handle.process.is_alive():
            handle.process.terminate()
            handle.process.join(1.0)
        if handle.process.is_alive():
            handle.process.kill()
            handle.process.join()
        handle.process.close()
