"""Fetch batches in worker processes that live as long as the loader does.

Each worker has one socket and no locks or queues in common with others: one that is killed takes
nothing with it. What it was making is made again by a successor; a batch that kills two workers is
reported, with the samples in it.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import selectors
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from accel.dataio.dataset.numbers import Numbers
from accel.dataio.engine import worker
from accel.dataio.engine.engine import BatchJob, Engine, FetchTimeout, WorkerDied, as_raised
from accel.dataio.engine.slots import MOST_IN_USE, SlotReader
from accel.dataio.engine.worker_handle import WorkerHandle, end_all
from accel.dataio.fetching import wire
from accel.dataio.fetching.fetch import blame, fetch_of
from accel.profiler.errors import InvalidArgument
from accel.profiler.interruptions import ours

log = logging.getLogger("accel.dataio")

_MOST_TRIES = 2
STALL_S = 30.0


class _Result(NamedTuple):
    """What became of a job, with the slots of the worker that made it: a successor has its own."""

    number: int
    slots: SlotReader
    message: Any


class WorkerPool:
    """The worker processes of an engine: started together, listened to, and ended by the process that started them.

    A worker keeps `most_free` slots while they are free; `as_loop`: see `ProcessEngine`.
    """

    def __init__(self, loader: DataLoader[Any], context: Any, workers: int, most_free: int, as_loop: bool) -> None:
        self._loader, self._context, self._workers = loader, context, workers
        self._most_free, self._as_loop = most_free, as_loop
        self._begin()

    def _begin(self) -> None:
        # Not epoll: a forked process would share its set with the loop's.
        self._selector = selectors.PollSelector()
        self.handles: list[WorkerHandle] = []
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, end_all, self.handles, self._owner)

    @property
    def is_forked(self) -> bool:
        """Whether this is a copy in a forked process: the workers are those of the loop where it came from."""
        return os.getpid() != self._owner

    def start(self, base_seed: int) -> None:
        for number in range(self._workers):
            handle = WorkerHandle(number)
            self.handles.append(handle)
            self.start_one(handle, base_seed)

    def start_one(self, handle: WorkerHandle, base_seed: int) -> None:
        task = worker.Task(
            handle.number,
            self._workers,
            fetch_of(self._loader),
            None if self._as_loop else self._loader.worker_init_fn,
            base_seed,
            most_free=self._most_free,
            as_loop=self._as_loop,
        )
        handle.start(self._context, task)
        self._selector.register(handle.connection, selectors.EVENT_READ, handle)  # type: ignore[arg-type]

    def messages(self, seconds: float) -> Iterator[tuple[WorkerHandle, Any]]:
        """Yield what workers say within a time, and None of one that is gone."""
        for key, _ in self._selector.select(seconds):
            messages = key.data.receive()
            while True:
                try:
                    message = next(messages, None)
                except ours(EOFError, OSError):
                    yield key.data, None
                    break
                if message is None:
                    break
                yield key.data, message

    def dead(self) -> list[WorkerHandle]:
        """Return those that are gone and have left no message."""
        return [
            handle
            for handle in self.handles
            if not handle.process.is_alive() and not handle.connection.poll()  # type: ignore[union-attr]
        ]

    def bury(self, handle: WorkerHandle) -> str:
        self._selector.unregister(handle.connection)  # type: ignore[arg-type]
        return handle.bury()

    def end(self) -> None:
        end_all(self.handles, self._owner)
        self._selector.close()
        self._selector = selectors.PollSelector()

    def reset(self) -> None:
        """End them, whatever they were at, and belong to this process."""
        end_all(self.handles, self._owner)
        self._finalizer.detach()
        self._selector.close()
        self._begin()


class JobBook:
    """The jobs of an engine, by serial number, the oldest first, and what has come of them.

    `waiting` are those whose workers were ended by a failure, or left behind in the process forked
    from.
    """

    def __init__(self) -> None:
        self.order: deque[int] = deque()
        self.results: dict[int, _Result] = {}
        self.waiting: dict[int, BatchJob] = {}
        self._tries: dict[int, int] = {}
        self.next = 0

    def forget(self, serial: int, handles: list[WorkerHandle]) -> None:
        """Take the oldest job out, wherever it is."""
        assert self.order[0] == serial
        self.order.popleft()
        for kept in (self.results, self._tries, self.waiting, *(handle.jobs for handle in handles)):
            kept.pop(serial, None)  # type: ignore[attr-defined]

    def clear(self) -> None:
        for result in self.results.values():
            if isinstance(result.message, worker.Done) and result.message.slot is not None:
                result.slots.free_at_once(result.message.slot)
        for kept in (self.order, self.results, self._tries, self.waiting):
            kept.clear()

    def count_try(self, handle: WorkerHandle, serial: int, death: str) -> None:
        """Note that a worker has died at a job; one that was begun twice is given up."""
        self._tries[serial] = self._tries.get(serial, 0) + 1
        if self._tries[serial] >= _MOST_TRIES:
            error = WorkerDied(
                f"{death}; so did the worker before it. Often memory ran out, or the samples crash native code: "
                "fetch these samples in the main process to see, or use fewer workers."
            )
            handle.jobs.pop(serial)
            self.results[serial] = _Result(handle.number, handle.slots, error)


class ProcessEngine(Engine):
    """Make batches of `loader` in `workers` processes.

    Args:
        loader: map-style loader; its dataset, collate function, worker_init_fn and time-out are used.
        workers: processes, at least 1.
        start_method: "fork", "forkserver" or "spawn"; None for the loader's own context, or the system's default.
        prefetch: batches each worker may be ahead, default 2.
        stall_s: after so many seconds (default 30) without its first batch, with `check`, a worker that was forked is
            taken for stuck on a lock that was copied locked; then all are given up: the loop can make the batch itself.
        as_loop: stand in for the loop's own process, where a loader has no workers: to the dataset they are none
            (`get_worker_info`, worker_init_fn), and a batch for which random numbers are drawn is not made but fails.
        check: called with the start method each time before workers are started; raises what keeps them from it. For
            processes that nobody asked for: `accel.dataio.dataset.handles.check_fork`.

    Raises:
        InvalidArgument: if a number is less than 1 or the start method is unknown here.
    """

    copies = True

    def __init__(
        self,
        loader: DataLoader[Any],
        workers: int,
        *,
        start_method: str | None = None,
        prefetch: int = 2,
        stall_s: float | None = None,
        check: Callable[[str], None] | None = None,
        as_loop: bool = False,
    ) -> None:
        for name, value in (("workers", workers), ("prefetch", prefetch)):
            if value < 1:
                raise InvalidArgument(f"{name} must be at least 1, got {value}")
        context = _context(loader, start_method)
        self.start_method: str = context.get_start_method()
        self.workers, self.capacity = workers, workers * prefetch
        self._timeout_s, self._check = float(loader.timeout), check
        self.stall_s = STALL_S if stall_s is None else stall_s
        # A worker may hold as many free slots as it can have jobs, and one for the batch in the loop's hands.
        self.pool = WorkerPool(loader, context, workers, prefetch + 2, as_loop)
        self._jobs = JobBook()
        self.base_seed = self._failed_starts = 0
        self._numbers: Numbers = {}
        """What has changed in the dataset since the workers were started."""
        self.deaths: list[str] = []
        """What became of workers that died; the loop went on."""

    # -- jobs --------------------------------------------------------------------------------------------------------

    def submit(self, job: BatchJob) -> None:
        self.start()
        jobs = self._jobs
        _freest(self.pool.handles).give(jobs.next, job._replace(numbers=self._numbers))
        jobs.order.append(jobs.next)
        jobs.next += 1

    def collect(self) -> Any:
        jobs = self._jobs
        serial = jobs.order[0]
        try:
            self._await(serial)
            number, slots, message = jobs.results[serial]
        finally:
            jobs.forget(serial, self.pool.handles)
        if isinstance(message, BaseException):
            raise message
        if isinstance(message, worker.Failed):
            raise as_raised(message.error, message.text, f"worker process {number} while fetching {message.at}")
        return _open(slots, message)

    def discard(self) -> None:
        self._jobs.clear()
        for handle in self.pool.handles:
            handle.jobs.clear()
            handle.send("stale", self._jobs.next)

    def update(self, numbers: Numbers) -> None:
        self._numbers = {**self._numbers, **numbers}

    def restart(self) -> None:
        self.discard()
        self._numbers = {}
        self._end_workers()

    def reset(self) -> None:
        self.pool.reset()
        self._jobs, self._numbers, self._failed_starts = JobBook(), {}, 0

    def close(self) -> None:
        self.restart()

    # -- starting ----------------------------------------------------------------------------------------------------

    @property
    def processes(self) -> list[Any]:
        return [handle.process for handle in self.pool.handles if handle.process is not None]

    def start(self) -> None:
        if self.pool.is_forked:
            self.reset()
        if self.pool.handles:
            return
        if self._check is not None:
            self._check(self.start_method)
        try:
            self.pool.start(self.base_seed)
        except BaseException:
            self._end_workers()
            raise
        jobs, self._jobs.waiting = self._jobs.waiting, {}
        _hand_out(self.pool.handles, jobs)

    def _end_workers(self) -> None:
        """End the workers; their jobs wait for others."""
        for handle in self.pool.handles:
            self._jobs.waiting |= handle.jobs
            handle.jobs = {}
        self.pool.end()

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _await(self, serial: int) -> None:
        results = self._jobs.results
        if serial in results:
            return
        self.start()
        results = self._jobs.results  # of this process
        began = time.monotonic()
        patience = min(1.0, self._timeout_s or 1.0, self.stall_s)
        while serial not in results:
            for handle, message in self.pool.messages(patience / 2):
                self._died(handle) if message is None else self._take(handle, message)
            waited = time.monotonic() - began
            if serial in results or waited < patience:
                continue
            for handle in self.pool.dead():
                self._died(handle)
            holder = next((h for h in self.pool.handles if serial in h.jobs), None)
            if holder is not None and waited > self._patience_s(holder):
                self.deaths.append(_stuck(holder, self._patience_s(holder)))
                self._end_workers()
                raise WorkerDied(self.deaths[-1])
            if self._timeout_s and waited > self._timeout_s:
                raise FetchTimeout(_late(holder, serial, waited, self._timeout_s))

    def _take(self, handle: WorkerHandle, message: Any) -> None:
        if isinstance(message, worker.Ready):
            handle.ready, self._failed_starts = True, 0
        elif isinstance(message, worker.Failed) and message.serial is None:
            self._end_workers()
            raise as_raised(message.error, message.text, f"worker process {handle.number} in {message.at}")
        elif message.serial in handle.jobs:
            handle.jobs.pop(message.serial)
            handle.served += 1
            self._jobs.results[message.serial] = _Result(handle.number, handle.slots, message)
        elif isinstance(message, worker.Done) and message.slot is not None:
            handle.slots.free_at_once(message.slot)  # it was given up meanwhile

    # -- failures ----------------------------------------------------------------------------------------------------

    def _died(self, handle: WorkerHandle) -> None:
        """Put a new worker in the place of one that is gone; a batch that was begun twice is given up."""
        first = next(iter(handle.jobs), None) if handle.ready else None
        when = "at its start"
        if handle.ready:
            when = "between batches" if first is None else f"while fetching {_samples(handle.jobs[first])}"
        death = f"{self.pool.bury(handle)} {when}"
        self.deaths.append(death)
        if first is not None:
            self._jobs.count_try(handle, first, death)
        elif not handle.ready:
            self._failed_starts += 1
            if self._failed_starts > max(2, self.workers):
                self._end_workers()
                raise WorkerDied(f"{death}, and so did those before it: no worker process can be started")
        log.warning("%s; a new one takes its place", death)
        jobs, handle.jobs = handle.jobs, {}
        try:
            self.pool.start_one(handle, self.base_seed)
        except ours() as error:
            self._jobs.waiting |= jobs
            self._end_workers()
            raise WorkerDied(f"{death}, and no other could be started: {error}") from error
        _hand_out([handle], jobs)

    def _patience_s(self, handle: WorkerHandle) -> float:
        """Return after how many seconds without a batch a worker is taken for stuck, and the loop makes the batch."""
        if self._check is None or self.start_method != "fork":
            return math.inf
        return self.stall_s if handle.served == 0 else max(STALL_S, self.stall_s)


def _stuck(handle: WorkerHandle, patience_s: float) -> str:
    """Return why a worker is given up: it waits for a lock that a thread of the loop held when it was forked.

    Workers by forkserver or spawn would not, but they import the script that is run, whose body may
    not be guarded.
    """
    batch = "a" if handle.served else "its first"
    return (
        f"worker process {handle.number} has not made {batch} batch in {patience_s:g} s; it was forked, so it probably "
        "waits for a lock that no thread of it can release. Start the loader before other threads, or choose "
        "start_method='forkserver' if the script is guarded by `if __name__ == '__main__'`"
    )


def _late(holder: WorkerHandle | None, serial: int, waited: float, timeout_s: float) -> str:
    limit = f"timeout={timeout_s:g}"
    if holder is None:
        return f"no worker has the batch after {waited:.0f} s ({limit})"
    what = _samples(holder.jobs[serial])
    return f"worker process {holder.number} has been fetching {what} for {waited:.0f} s ({limit})"


def _hand_out(handles: list[WorkerHandle], jobs: dict[int, BatchJob]) -> None:
    for serial in sorted(jobs):
        _freest(handles).give(serial, jobs[serial])


def _freest(handles: list[WorkerHandle]) -> WorkerHandle:
    return min(handles, key=lambda each: len(each.jobs))


def _samples(job: BatchJob) -> str:
    return blame(RuntimeError(), job.indices)


def _open(slots: SlotReader, message: worker.Done) -> Any:
    memory: Any = message.data
    if message.slot is not None:
        memory = slots.view(message.slot)
        if slots.in_use > MOST_IN_USE:
            # The loop keeps its batches: they get memory of their own, so that the slot comes back.
            memory = bytearray(memory)
    return wire.load(message.payload, message.sizes, memory)


def _context(loader: DataLoader[Any], start_method: str | None) -> Any:
    if start_method is None:
        return loader.multiprocessing_context or multiprocessing.get_context()
    if start_method not in multiprocessing.get_all_start_methods():
        known = ", ".join(multiprocessing.get_all_start_methods())
        raise InvalidArgument(f"start_method must be one of {known} on this system, got {start_method!r}")
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        # Paid once, by the server, instead of by every worker: importing torch takes seconds.
        context.set_forkserver_preload(["__main__", "accel.dataio.engine.worker"])
    return context
