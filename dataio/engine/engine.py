"""What makes batches: in the loop's own thread, in threads, or in processes, behind one interface."""

from __future__ import annotations

import os
import pickle
import threading
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import DataLoader

from accel.dataio.engine.thread_pool import ThreadModes, ThreadPool
from accel.dataio.fetching.fetch import blame, fetch_of
from accel.dataio.fetching.randomness import (
    others_could_draw,
    put_back,
    random_state,
    seed_everything,
    states,
    states_of_their_own,
)
from accel.profiler.errors import AccelError, InvalidArgument, InvalidState
from accel.profiler.interruptions import ours
from accel.profiler.trees import tensors

if TYPE_CHECKING:
    from accel.dataio.dataset.numbers import Numbers
    from accel.dataio.dataset.watch import DatasetWatch


class WorkerDied(AccelError, RuntimeError):
    """A worker process ended, and starting another did not help."""


class FetchTimeout(AccelError, RuntimeError):
    """A batch has taken longer than the loader's `timeout`."""


class ThreadsDraw(AccelError, RuntimeError):
    """Fetching draws random numbers, which threads have in common with each other and with the loop."""


class NotAhead(AccelError, RuntimeError):
    """Batches that nobody asked for may not be made ahead: they could be others than the loop's own."""


class BatchHasGraph(AccelError, RuntimeError):
    """A batch hangs on a graph: made ahead, it is computed with weights from before the optimizer's step."""


class BatchJob(NamedTuple):
    """One batch to be made.

    Attributes:
        indices: what the batch sampler yielded.
        seed: of the random numbers that fetching may draw; None to leave them alone.
        dataset: to read in place of the loader's own, by engines without copies; None for the loader's own.
        number: of the batch in its epoch.
        watch: for threads, which read the loop's own dataset: what it must be as; None for anything.
        numbers: of the dataset, for engines with copies of it: under which the batch is to be made; set by the engine.
    """

    indices: Any
    seed: int | None
    dataset: Any = None
    number: int = 0
    watch: DatasetWatch | None = None
    numbers: Numbers = {}  # noqa: RUF012  (never changed)


class Engine(ABC):
    """Makes batches, in the order of their jobs.

    Attributes:
        capacity: jobs that may be under way before the oldest is collected.
        copies: batches are made from copies of the dataset.
        base_seed: of the random numbers of workers that are started from now on.
    """

    capacity = 1
    copies = False
    base_seed = 0

    def start(self) -> None:  # noqa: B027  (there is nothing to start in the loop's own thread)
        """Start threads and processes, if there are none; raises what keeps them from starting."""

    @abstractmethod
    def submit(self, job: BatchJob) -> None:
        """Take a job."""

    @abstractmethod
    def collect(self) -> Any:
        """Return the batch of the oldest job, which is then gone; raises what fetching it raised."""

    @abstractmethod
    def discard(self) -> None:
        """Forget all jobs that were not collected; those not begun are never made."""

    @abstractmethod
    def update(self, numbers: Numbers) -> None:
        """Set numbers in copies of the dataset; without copies, look again whether fetching draws."""

    @abstractmethod
    def restart(self) -> None:
        """Forget all jobs and take the dataset as it is now, and the collate function."""

    @abstractmethod
    def reset(self) -> None:
        """Be as one that was just made, whatever was going on: an interruption may have left anything half done."""

    def close(self) -> None:
        """Give up threads and processes; those at work end after the batch in hand."""
        self.reset()


# Batches for which no random number is drawn, after which none is looked for any more: 0.1 ms each.
_TRIED = 16


def _tell(error: Exception, where: str, job: BatchJob) -> None:
    """Have an error say where it was raised, and at which sample."""
    text = f"in {where} while fetching {blame(error, job.indices)}"
    try:
        error.add_note(text)
    except ours():  # before Python 3.11, or of a class that can't be written to: as its cause
        place = _Elsewhere(text)
        place.__cause__ = error.__cause__ or error.__context__
        object.__setattr__(error, "__cause__", place)


class _Elsewhere(AccelError):
    """Shows, as the cause of an error, where it was raised."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._text = text

    def __str__(self) -> str:
        return self._text


class InlineEngine(Engine):
    """Make each batch when it is asked for, in the loop's own thread: for samples that cost less than a hand-over.

    A job's seed holds for its batch alone: the loop's own random states are put back. So
    augmentation is the same as in a worker process, and the loop draws the same numbers whichever
    engine fetches. Python, torch and numpy have one generator for all threads: another thread that
    draws meanwhile gets its numbers from the batch's states.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._fetch = fetch_of(loader)
        self.jobs: deque[BatchJob] = deque()
        self.draws = False
        self._quiet = 0  # batches in a row for which nothing was drawn

    def submit(self, job: BatchJob) -> None:
        self.jobs.append(job)

    def collect(self) -> Any:
        job = self.jobs[0]  # until its batch is there: after Ctrl-C it is made again
        try:
            batch = self._made(job)
        except ours() as error:
            self.jobs.popleft()
            _tell(error, "the loop's own thread", job)
            raise
        self.jobs.popleft()
        return batch

    def _made(self, job: BatchJob) -> Any:
        if job.seed is None or self._quiet >= _TRIED:
            return self._fetch(job.indices)
        return self._made_from_seed(job.indices, job.seed)

    def _made_from_seed(self, indices: Any, seed: int) -> Any:
        before = states()
        try:
            seed_everything(seed)
            batch = self._noting_draws(indices)
            put_back(before)
        except BaseException:  # also Ctrl-C while they were put back
            put_back(before)
            raise
        # In a row: one draw, however late in the first batches, and all batches are seeded.
        self._quiet = 0 if self.draws else self._quiet + 1
        return batch

    def _noting_draws(self, indices: Any) -> Any:
        began = random_state()
        try:
            return self._fetch(indices)
        finally:
            self.draws = self.draws or random_state() != began

    def discard(self) -> None:
        self.jobs.clear()

    def update(self, numbers: Numbers) -> None:
        self._quiet = 0

    def restart(self) -> None:
        self.jobs = deque()
        self.update({})

    def reset(self) -> None:
        self.restart()


class ThreadEngine(Engine):
    """Make batches ahead in threads of this process: for decoders that release the interpreter's lock, and storage.

    The dataset is read by several threads at once if `workers` is more than 1: it must be made for
    that. And it may not draw random numbers, since all threads draw from the same: the first batch,
    and the first after a change of the dataset, is made in the loop's own thread while the others
    wait, and `ThreadsDraw` raised if it drew.
    """

    def __init__(self, loader: DataLoader[Any], workers: int, *, prefetch: int = 2) -> None:
        if workers < 1:
            raise InvalidArgument(f"workers must be at least 1, got {workers}")
        self._loader, self._fetch = loader, fetch_of(loader)
        self.workers, self.capacity = workers, workers * prefetch
        self._timeout_s = loader.timeout or None
        self._pool: ThreadPool | None = None
        self._futures: deque[tuple[BatchJob, Future[Any]]] = deque()
        # Until a batch was seen not to draw, jobs are held back: the oldest is made in the loop's own thread.
        self._quiet = False
        self._held_back: deque[BatchJob] = deque()
        self._modes: ThreadModes | None = None  # of the loop, under which the threads make what they have
        self._owner = os.getpid()

    def start(self) -> None:
        if os.getpid() != self._owner:  # in a forked process, where no thread came along
            self._owner = os.getpid()
            self.reset()
        if self._pool is None:
            self._pool = ThreadPool(self.workers, "accel-loader")

    def submit(self, job: BatchJob) -> None:
        self.start()
        self._follow_modes()
        self._held_back.append(job)
        self._hand_out()

    def _follow_modes(self) -> None:
        """Have batches made again that were begun under modes of torch in which the loop does not ask for them.

        They are begun when the loop is at those before: the first of an epoch under the modes of a validation, say.
        """
        now = ThreadModes.now()
        if now == self._modes:
            return
        self._modes = now
        for _, future in self._futures:
            future.cancel()
        self._held_back.extendleft(job for job, _ in reversed(self._futures))
        self._futures.clear()

    def _hand_out(self) -> None:
        assert self._pool is not None
        while self._quiet and self._held_back:
            job = self._held_back.popleft()
            self._futures.append((job, self._pool.submit(self._made_in_thread, self._modes, job)))

    def collect(self) -> Any:
        self.start()
        self._follow_modes()
        self._hand_out()
        if self._futures or self._quiet:
            return self._awaited(*self._futures.popleft())
        batch = self._made_by_loop(self._held_back.popleft())
        self._quiet = True
        self._hand_out()
        return batch

    def _awaited(self, job: BatchJob, future: Future[Any]) -> Any:
        wait([future], self._timeout_s)
        if not future.done():
            raise FetchTimeout(
                f"a thread has been fetching {blame(RuntimeError(), job.indices)} for {self._timeout_s:g} s "
                f"(timeout={self._timeout_s:g})"
            )
        return future.result()

    def _made_by_loop(self, job: BatchJob) -> Any:
        """Make a batch in the loop's own thread; raises `ThreadsDraw` if random numbers were drawn meanwhile."""
        with states_of_their_own():
            before = random_state()
            try:
                batch = self._made(job)
            except ours() as error:
                _tell(error, "the loop's own thread", job)
                raise
            if random_state() == before:
                return batch
        by = ", by it or by another thread" if others_could_draw() else ""
        raise ThreadsDraw(f"fetching a sample draws random numbers{by}, which threads can't keep apart")

    def _made_in_thread(self, modes: ThreadModes, job: BatchJob) -> Any:
        thread = f"thread {threading.current_thread().name.rpartition('_')[2]}"
        try:
            with modes.entered():
                return self._made(job)
        except ours() as error:
            _tell(error, thread, job)
            raise
        except BaseException as error:  # sys.exit() in a dataset: it is the loop that decides
            at = f"{thread} while fetching {blame(error, job.indices)}"
            raise InvalidState(f"{type(error).__name__} was raised in {at}: {error}") from error

    def _made(self, job: BatchJob) -> Any:
        _refuse_changed(job)
        batch = (self._fetch if job.dataset is None else self._fetch.of(job.dataset))(job.indices)
        _refuse_graph(batch)
        _refuse_changed(job)  # the loop may put back what it has changed
        return batch

    def discard(self) -> None:
        for _, future in self._futures:
            future.cancel()
        self._futures.clear()
        self._held_back.clear()

    def update(self, numbers: Numbers) -> None:
        self._quiet = False

    def restart(self) -> None:
        self.discard()
        self._fetch = fetch_of(self._loader)
        self.update({})

    def reset(self) -> None:
        for _, future in self._futures:
            future.cancel()
        if self._pool is not None:
            self._pool.shutdown()
        self._pool, self._futures, self._held_back = None, deque(), deque()
        self._quiet = False


def _refuse_changed(job: BatchJob) -> None:
    if job.watch is not None and job.dataset is None and job.watch.changed(job.indices):
        raise NotAhead(f"the loop changes {job.watch.change} within an epoch")


def _refuse_graph(batch: Any) -> None:
    hanging = next((tensor for tensor in tensors(batch) if tensor.grad_fn is not None), None)
    if hanging is not None:
        raise BatchHasGraph(
            "batches hang on a graph, and those that threads make ahead would be computed with old weights. Found: "
            f"grad_fn={hanging.grad_fn!r}; compute it in the loop, or use mode='inline'"
        )


def as_raised(pickled: bytes | None, text: str, where: str) -> BaseException:
    """Return an error of another process as it was raised there, with the place and the traceback as its cause."""
    try:
        error = None if pickled is None else pickle.loads(pickled)
    except ours():  # of a class that only the worker knows
        error = None
    if not isinstance(error, BaseException):
        error = InvalidState(f"in {where}:\n{text}")
    elif isinstance(error, StopIteration) or not isinstance(error, Exception):
        # It would be taken for the end of the epoch, or for a wish to end the loop's own process.
        error = InvalidState(f"{type(error).__name__} was raised in {where}: {error}")
    # Past a __setattr__ of its class.
    object.__setattr__(error, "__cause__", _Elsewhere(f"in {where}:\n\n{text}"))
    return error
