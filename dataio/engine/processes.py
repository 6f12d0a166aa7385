"""Fetch batches in worker processes that live as long as the loader does.

Each worker has one socket and no locks or queues in common with others: one that is killed takes nothing with it. What
it was making is made again by a successor; a batch that kills two workers is reported, with the samples in it.
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
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from accel.dataio.dataset.numbers import Numbers
from accel.dataio.engine import wire, worker
from accel.dataio.engine.engine import BatchJob, FetchTimeout, WorkerDied, WorkersStuck, as_raised
from accel.dataio.engine.slots import MOST_IN_USE, SlotReader
from accel.dataio.engine.thread_pool import at_rest
from accel.dataio.engine.worker_handle import WorkerHandle, end_all
from accel.dataio.fetching.fetch import blame, fetch_of
from accel.profiler.interruptions import ours

log = logging.getLogger("accel.dataio")

_MOST_TRIES = 2
_WARN_S = 60.0
STALL_S = 30.0
# A fork waits so long for the threads of other engines to finish the batch in hand.
_REST_S = 5.0


class _Result(NamedTuple):
    """What became of a job, with the slots of the worker that made it: a successor has its own."""

    number: int
    slots: SlotReader
    message: Any
    job: BatchJob


class ProcessEngine:
    """Make batches of `loader` in `workers` processes; see `accel.dataio.engine.engine.Engine`.

    Args:
        loader: map-style loader; its dataset, collate function, worker_init_fn and time-out are used.
        workers: processes, at least 1.
        start_method: "fork", "forkserver" or "spawn"; None for the loader's own context, or the system's default.
        prefetch: batches each worker may be ahead, default 2.
        threads: threads of an operation inside a worker, default 1, as in `DataLoader`.
        stall_s: after so many seconds (default 30) without its first batch, a worker that was forked while other
            threads ran is taken for stuck on a lock that was copied locked; then all are given up. With `check` any
            forked worker is, and after 30 seconds at least at any later batch: the loop can make it itself.
        as_loop: stand in for the loop's own process, where a loader has no workers: to the dataset they are none
            (`get_worker_info`, worker_init_fn), and a batch for which random numbers are drawn is not made but fails.
        check: called with the start method each time before workers are started; raises what keeps them from it. For
            processes that nobody asked for: `accel.dataio.dataset.handles.check_fork`.

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
        stall_s: float | None = None,
        check: Callable[[str], None] | None = None,
        as_loop: bool = False,
    ) -> None:
        for name, value in (("workers", workers), ("prefetch", prefetch), ("threads", threads)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._loader = loader
        self._context = _context(loader, start_method)
        self.start_method: str = self._context.get_start_method()
        self.workers, self.capacity = workers, workers * prefetch
        self._threads, self._timeout_s, self._check = threads, float(loader.timeout), check
        self.stall_s = STALL_S if stall_s is None else stall_s
        self._as_loop = as_loop
        self.base_seed = 0
        self.deaths: list[str] = []
        """What became of workers that died; the loop went on."""
        self._begin()
        self._own([])

    def _begin(self) -> None:
        # Not epoll: a forked process would share its set with the loop's.
        self._selector = selectors.PollSelector()
        self._order: deque[int] = deque()
        self._results: dict[int, _Result] = {}
        # Jobs that no worker has: their workers were ended by a failure, or left behind in the process forked from.
        self._waiting: dict[int, BatchJob] = {}
        self._tries: dict[int, int] = {}
        self._failed_starts = 0
        self._numbers: Numbers = {}
        """What has changed in the dataset since the workers were started."""
        self._next = 0

    def _own(self, handles: list[WorkerHandle]) -> None:
        self._handles, self._owner = handles, os.getpid()
        self._finalizer = weakref.finalize(self, end_all, handles, self._owner)

    # -- jobs --------------------------------------------------------------------------------------------------------

    def submit(self, job: BatchJob) -> None:
        """Hand a job to the worker that has the fewest."""
        self.start()
        _freest(self._handles).give(self._next, job._replace(numbers=self._numbers))
        self._order.append(self._next)
        self._next += 1

    def collect(self) -> Any:
        """Return the batch of the oldest job; raises what fetching it raised."""
        serial = self._order[0]
        try:
            self._await(serial)
            number, slots, message, _ = self._results[serial]
        except ours():
            self._forget(serial)
            raise
        self._forget(serial)
        if isinstance(message, BaseException):
            raise message
        if isinstance(message, worker.Failed):
            raise as_raised(message.error, message.text, f"worker process {number} while fetching {message.at}")
        return _open(slots, message)

    def discard(self) -> None:
        """Forget all jobs that were not collected."""
        for result in self._results.values():
            if isinstance(result.message, worker.Done) and result.message.slot is not None:
                result.slots.free_at_once(result.message.slot)
        for kept in (self._order, self._results, self._tries, self._waiting):
            kept.clear()
        for handle in self._handles:
            handle.jobs.clear()
            handle.send("stale", self._next)

    def update(self, numbers: Numbers) -> None:
        """Set numbers in the workers' copies of the dataset, for the jobs submitted from now on."""
        self._numbers = {**self._numbers, **numbers}

    def restart(self) -> None:
        """End the workers; the next job starts new ones, with the dataset as it is then."""
        self.discard()
        self._numbers = {}
        self._end_workers()

    def reset(self) -> None:
        """End the workers, whatever they and this engine were at; the next job starts new ones."""
        end_all(self._handles, self._owner)
        self._finalizer.detach()
        self._selector.close()
        self._begin()
        self._own([])

    def close(self) -> None:
        """End the workers."""
        self.restart()

    def _forget(self, serial: int) -> None:
        """Take the oldest job out, wherever it is."""
        assert self._order[0] == serial
        self._order.popleft()
        for kept in (self._results, self._tries, self._waiting, *(handle.jobs for handle in self._handles)):
            kept.pop(serial, None)  # type: ignore[attr-defined]

    # -- starting ----------------------------------------------------------------------------------------------------

    @property
    def processes(self) -> list[Any]:
        """The worker processes that run."""
        return [handle.process for handle in self._handles if handle.process is not None]

    def start(self) -> None:
        """Start the workers, if there are none."""
        if os.getpid() != self._owner:  # in a forked process: the workers are those of the loop there
            self.reset()
        if self._handles:
            return
        if self._check is not None:
            self._check(self.start_method)
        try:
            for number in range(self.workers):
                handle = WorkerHandle(number)
                self._handles.append(handle)
                self._start(handle)
        except BaseException:
            self._end_workers()
            raise
        jobs, self._waiting = self._waiting, {}
        self._hand_out(self._handles, jobs)

    def _start(self, handle: WorkerHandle) -> None:
        loader = self._loader
        # A worker may hold as many free slots as it can have jobs, and one for the batch in the loop's hands.
        task = worker.Task(
            handle.number,
            self.workers,
            fetch_of(loader),
            None if self._as_loop else loader.worker_init_fn,
            self.base_seed,
            self._threads,
            most_free=self.capacity // self.workers + 2,
            as_loop=self._as_loop,
        )
        self._start_process(handle, task)
        self._selector.register(handle.connection, selectors.EVENT_READ, handle)  # type: ignore[arg-type]

    def _start_process(self, handle: WorkerHandle, task: worker.Task) -> None:
        if self.start_method != "fork":
            handle.start(self._context, task)
            return
        with at_rest(_REST_S) as quiet:
            if not quiet:
                raise RuntimeError(
                    "a process can't be forked while threads fetch, whose locks it would inherit; one has been at its "
                    f"batch for {_REST_S:g} s"
                )
            handle.start(self._context, task)

    def _hand_out(self, handles: list[WorkerHandle], jobs: dict[int, BatchJob]) -> None:
        """Give jobs to workers that were just started."""
        for serial in sorted(jobs):
            _freest(handles).give(serial, jobs[serial])

    def _end_workers(self) -> None:
        """End the workers; their jobs wait for others."""
        for handle in self._handles:
            self._waiting |= handle.jobs
            handle.jobs = {}
        end_all(self._handles, self._owner)
        self._selector.close()
        self._selector = selectors.PollSelector()

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _await(self, serial: int) -> None:
        if serial in self._results:
            return
        self.start()
        began = warned = time.monotonic()
        patience = min(1.0, self._timeout_s or 1.0)
        while serial not in self._results:
            for key, _ in self._selector.select(patience / 2):
                self._hear(key.data)
            waited = time.monotonic() - began
            if serial in self._results or waited < patience:
                continue
            self._look_for_dead()
            holder = next((h for h in self._handles if serial in h.jobs), None)
            if holder is not None and waited > self._patience_s(holder):
                self._give_up(holder)
            elif self._timeout_s and waited > self._timeout_s:
                raise FetchTimeout(self._late(serial, waited))
            elif time.monotonic() - warned > _WARN_S and holder is not None:
                warned = time.monotonic()
                holder.send("where", None)

    def _hear(self, handle: WorkerHandle) -> None:
        messages = handle.receive()
        while True:
            try:
                message = next(messages, None)
            except ours(EOFError, OSError):
                self._died(handle)
                return
            if message is None:
                return
            self._take(handle, message)

    def _take(self, handle: WorkerHandle, message: Any) -> None:
        if isinstance(message, worker.Ready):
            handle.ready, self._failed_starts = True, 0
        elif isinstance(message, worker.Where):
            log.warning(
                "worker process %d has been at one batch for over %.0f s; it is here:\n%s",
                handle.number,
                _WARN_S,
                message.stack,
            )
        elif isinstance(message, worker.Failed) and message.serial is None:
            self._end_workers()
            raise as_raised(message.error, message.text, f"worker process {handle.number} in {message.at}")
        elif message.serial in handle.jobs:
            job = handle.jobs.pop(message.serial)
            handle.served += 1
            self._results[message.serial] = _Result(handle.number, handle.slots, message, job)
        elif isinstance(message, worker.Done) and message.slot is not None:
            handle.slots.free_at_once(message.slot)  # it was given up meanwhile

    # -- failures ----------------------------------------------------------------------------------------------------

    def _look_for_dead(self) -> None:
        for handle in list(self._handles):
            if not handle.process.is_alive() and not handle.connection.poll():  # type: ignore[union-attr]
                self._died(handle)

    def _died(self, handle: WorkerHandle) -> None:
        """Put a new worker in the place of one that is gone; a batch that was begun twice is given up."""
        self._selector.unregister(handle.connection)  # type: ignore[arg-type]
        first = next(iter(handle.jobs), None) if handle.ready else None
        when = "at its start"
        if handle.ready:
            when = "between batches" if first is None else f"while fetching {_samples(handle.jobs[first])}"
        death = f"{handle.bury()} {when}"
        self.deaths.append(death)
        if first is not None:
            self._count_try(handle, first, death)
        elif not handle.ready:
            self._failed_starts += 1
            if self._failed_starts > max(2, self.workers):
                self._end_workers()
                raise WorkerDied(f"{death}, and so did those before it: no worker process can be started")
        log.warning("%s; a new one takes its place", death)
        jobs, handle.jobs = handle.jobs, {}
        try:
            self._start(handle)
        except ours() as error:
            self._waiting |= jobs
            self._end_workers()
            raise WorkerDied(f"{death}, and no other could be started: {error}") from error
        self._hand_out([handle], jobs)

    def _count_try(self, handle: WorkerHandle, serial: int, death: str) -> None:
        self._tries[serial] = self._tries.get(serial, 0) + 1
        if self._tries[serial] >= _MOST_TRIES:
            error = WorkerDied(
                f"{death}; so did the worker before it. Often memory ran out, or the samples crash native code: "
                "fetch these samples in the main process to see, or use fewer workers."
            )
            self._results[serial] = _Result(handle.number, handle.slots, error, handle.jobs.pop(serial))

    def _patience_s(self, handle: WorkerHandle) -> float:
        """Return after how many seconds without a batch a worker is taken for stuck."""
        unasked = self._check is not None  # native threads hold locks too, and are counted nowhere
        if self.start_method != "fork":
            return math.inf
        if handle.served == 0 and (unasked or handle.threads_at_start > 1):
            return self.stall_s
        return max(STALL_S, self.stall_s) if unasked else math.inf

    def _give_up(self, handle: WorkerHandle) -> None:
        """End the workers: one waits for a lock that a thread of the loop held when it was forked.

        Workers by forkserver or spawn would not, but they import the script that is run, whose body may not be guarded.
        """
        threads, batch = handle.threads_at_start, "a" if handle.served else "its first"
        forked = f"while {threads} threads ran" if threads > 1 else "from a process with native threads"
        reason = (
            f"worker process {handle.number} has not made {batch} batch in {self._patience_s(handle):g} s; it was "
            f"forked {forked}, so it probably waits for a lock that no thread of it can release. "
            "Start the loader before other threads, or choose start_method='forkserver' if the script is guarded by "
            "`if __name__ == '__main__'`"
        )
        self.deaths.append(reason)
        self._end_workers()
        raise WorkersStuck(reason)

    def _late(self, serial: int, waited: float) -> str:
        limit = f"timeout={self._timeout_s:g}"
        for handle in self._handles:
            if serial in handle.jobs:
                what = _samples(handle.jobs[serial])
                return f"worker process {handle.number} has been fetching {what} for {waited:.0f} s ({limit})"
        return f"no worker has the batch after {waited:.0f} s ({limit})"


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
        raise ValueError(f"start_method must be one of {known} on this system, got {start_method!r}")
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        # Paid once, by the server, instead of by every worker: importing torch takes seconds.
        context.set_forkserver_preload(["__main__", "accel.dataio.engine.worker"])
    return context
