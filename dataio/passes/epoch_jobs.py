"""The jobs of an epoch: made of its index lists, given to an engine, and kept until the loop is past their batches.

    jobs:   collected, maybe in the loop's hands | the engine has them | drawn | those of the epoch drawn ahead
            ^ handed                             ^ served              ^ given

A job stays on record until the loop asks for a batch after it. So after Ctrl-C, wherever it came,
everything from `handed` on can be made again. All that changes when a batch is collected is one
number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from accel.dataio.engine.engine import BatchJob, Engine
from accel.dataio.fetching.randomness import derived_seed
from accel.dataio.passes.epochs import Ahead, draw_at_end, draws_at_end, ordering
from accel.profiler.errors import InvalidState
from accel.profiler.interruptions import ours

if TYPE_CHECKING:
    from accel.dataio.passes.not_ahead import AheadCheck


class IndexLists:
    """Yields the index lists of an epoch, first those that were drawn before and given back.

    `is_on_demand`: each is drawn when the loop asks for it. `is_ahead`: they are those of copies of
    the samplers.

    torch's `BatchSampler` reads its batch size at each list (with drop_last only when an epoch begins). A list that was
    given back after the loop has set it is as long as it would be drawn now.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        indices: Iterator[Any],
        base_seed: int = 0,
        dataset: Any = None,
        *,
        is_ahead: bool = False,
    ) -> None:
        self._loader, self._lists = loader, indices
        outer = loader._index_sampler
        self._batches = outer if type(outer) is BatchSampler and not outer.drop_last else None
        self._size, self._is_uneven = self._size_now, False  # of the lists drawn
        self._rest: list[Any] = []  # left over of a longer one
        self.exhausted = self._is_drawing = False
        self._owes_end = is_ahead and draws_at_end(loader) and not _is_single(loader)
        self._generator = ordering(loader).generator if draws_at_end(loader) and not is_ahead else None
        self.is_on_demand = False
        self._seeds = loader.worker_init_fn is None
        self.number(base_seed, dataset=dataset)
        self._back: deque[Any] = deque()
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        size = self._size_now
        self._is_uneven = self._is_uneven or size != self._size
        indices = self._joined(size) if self._is_uneven else self._next()
        if self.is_on_demand and self.is_cut_short(indices):
            self.end()
        return indices

    @property
    def _size_now(self) -> int:
        return 0 if self._batches is None else self._batches.batch_size

    @property
    def has_new_size(self) -> bool:
        """Whether the loop has set another batch size since lists were drawn."""
        return self._size_now != self._size

    def _joined(self, size: int) -> list[Any]:
        """Return a list of this length, of those that are drawn or were given back."""
        while len(self._rest) < size:
            try:
                self._rest += self._next()
            except StopIteration:
                break
        indices, self._rest = self._rest[:size], self._rest[size:]
        if not indices:
            raise StopIteration
        return indices

    def _next(self) -> Any:
        if self._back:
            return self._back.popleft()
        if self._error is not None:
            raise self._error
        try:
            return _copied(next(self._lists) if self._generator is None else self._drawn())
        except StopIteration:
            self.exhausted = True
            if self.is_on_demand:
                self.end()
            raise
        except ours() as error:
            self._error = error
            raise

    def _drawn(self) -> Any:
        """Return the next list; a draw from the loader's generator at the end has to wait."""
        generator = self._generator
        if generator is None or self.is_on_demand or not self.next_number:
            return next(self._lists)
        before = generator.get_state()
        try:
            return next(self._lists)
        finally:
            if not torch.equal(generator.get_state(), before):
                generator.set_state(before)
                self._owes_end = True

    @property
    def is_over(self) -> bool:
        """Whether the sampler has drawn all that it draws in an epoch."""
        return self.exhausted and not self._owes_end

    def is_cut_short(self, indices: Any) -> bool:
        """Whether a list is shorter than others, as the last one may be, and the sampler's end is due."""
        if not self._owes_end:
            return False
        batches = self._loader.batch_sampler
        return type(batches) is BatchSampler and len(indices) < batches.batch_size

    def end(self) -> None:
        """The loop has come to the end: have the sampler draw what it draws there."""
        if self._owes_end:
            self._owes_end = False
            draw_at_end(self._loader)

    def give_back(self, jobs: list[BatchJob]) -> None:
        """Take back lists that were drawn and not used, those of these jobs, oldest first."""
        self._dataset = None
        if self._is_drawing and self._error is None:
            self._error = InvalidState(
                "this pass can't go on: it was interrupted while the sampler drew an index list, which is lost; "
                "begin a new pass over the loader"
            )
        if jobs:
            self.next_number, self.exhausted = jobs[0].number, False
        rest, self._rest = self._rest, []
        self._back.extendleft(reversed([*(job.indices for job in jobs), *([rest] if rest else [])]))
        self._is_uneven, self._size = self._is_uneven or self.has_new_size, self._size_now

    # -- as jobs -----------------------------------------------------------------------------------

    def number(self, base_seed: int, first: int = 0, dataset: Any = None) -> None:
        """Make jobs of the lists from this number on; seeds are left alone with a worker_init_fn."""
        self.base_seed, self.next_number, self._dataset = base_seed, first, dataset

    def next_job(self, take: Callable[[BatchJob], Any]) -> bool:
        """Hand the next list to `take`, as a job, and return whether there was one."""
        self._is_drawing = True  # after an interruption the list is lost
        try:
            indices = next(self)
        except StopIteration:
            self._is_drawing = False
            return False
        except ours():
            self._is_drawing = False
            raise
        seed = derived_seed(self.base_seed, self.next_number) if self._seeds else None
        take(BatchJob(indices, seed, self._dataset, self.next_number))
        self.next_number += 1
        self._is_drawing = False
        return True


def _copied(indices: Any) -> Any:
    """Return an index list that stays as it is: a sampler may yield one list again and again, with other indices."""
    if type(indices) is list or isinstance(indices, np.ndarray):
        return indices.copy()
    return indices.clone() if isinstance(indices, Tensor) else indices


def _is_single(loader: DataLoader[Any]) -> bool:
    """Return whether an epoch is one short list, with which the sampler's end is drawn."""
    batches = loader.batch_sampler
    return type(batches) is BatchSampler and len(batches.sampler) < batches.batch_size  # type: ignore[arg-type]


class EpochJobs:
    """The jobs of one epoch, and where each of them is.

    Attributes:
        served: number of the next batch to be collected.
        handed: number of the first batch that the loop has not got; set by whoever hands them over.
        failed: the next batch could not be made, and the engine has its job no more.
        feeding: lists are drawn; False drains the engine: it returns what is under way, and then the epoch ends.
        ended: the loop has been told that there are no more batches.
        ahead: of an epoch drawn ahead, until its lists count.
        following: the next epoch, once it is drawn ahead; `may_look_ahead`: it may be, once all lists of this one are.
        sampler_error: raised when a list was drawn.
    """

    def __init__(self, lists: IndexLists, ahead: Ahead | None = None, *, may_look_ahead: bool = True) -> None:
        self.lists, self.ahead, self.may_look_ahead = lists, ahead, may_look_ahead
        self._jobs: deque[BatchJob] = deque()
        self.served = self.handed = self._given = lists.next_number
        self.feeding, self.failed, self.ended = True, False, False
        self.following: EpochJobs | None = None
        self.sampler_error: Exception | None = None

    @property
    def waiting(self) -> int:
        """How many jobs of this epoch have not been collected."""
        return self._jobs[-1].number + 1 - self.served if self._jobs else 0

    @property
    def oldest(self) -> BatchJob | None:
        """The job whose batch is the next one."""
        return self._jobs[self.served - self._jobs[0].number] if self.waiting > 0 else None

    @property
    def is_over(self) -> bool:
        """Whether the loop has got all batches, and the sampler has drawn all that it draws in an epoch.

        A loop that leaves with the last batch does not ask for one more, which is when the sampler
        may draw once more.
        """
        return self.waiting == 0 and self.lists.is_over

    def draw(self) -> bool:
        """Draw the next list, of the epoch that follows once there is one; return whether there was a list."""
        if self.following is not None:
            return self.following.draw()
        if self.lists.exhausted:
            return False
        try:
            return self.lists.next_job(self._jobs.append)
        except ours() as error:
            self.sampler_error = error
            raise

    def give(self, engine: Engine, check: AheadCheck, most: int) -> int:
        """Give an engine jobs until it has `most`, the oldest first; return how many more it may have."""
        end = self.served + min(most, self.waiting)
        while self._given < end:
            job = self._jobs[self._given - self._jobs[0].number]
            engine.submit(job._replace(watch=check.watch) if check.strict else job)
            self._given += 1
        room = most - self.waiting
        return room if self.following is None else self.following.give(engine, check, room)

    def collected(self, job: BatchJob) -> None:
        """Count the oldest job as collected."""
        if self.lists.is_cut_short(job.indices):
            self.lists.end()  # the sampler is read to its end for a batch that it can't fill
        self.served += 1

    def move_on(self) -> None:
        """Forget the batches handed over, as the loop asks for another, and pass over one that could not be made."""
        if self.failed:
            self.failed = False
            self.served += 1
        while self._jobs and self._jobs[0].number < self.handed:
            self._jobs.popleft()

    def go_back(self) -> None:
        """Begin again with the first batch that the loop has not got; the engine has no jobs any more."""
        self.move_on()
        self.served = self._given = self.handed
        self.failed, self.following = False, None

    def take_back(self, engine: Engine) -> None:
        """Have an engine forget the jobs that it has; it gets those of this epoch again, of the dataset as it is."""
        if self._given > self.served + self.failed or self.following is not None:
            engine.discard()
        self._jobs = deque(job._replace(dataset=None) for job in self._jobs)
        self.lists.number(self.lists.base_seed, self.lists.next_number)
        self._given, self.failed, self.following = self.served, False, None

    def give_lists_back(self, *, is_on_demand: bool = True) -> None:
        """Have the lists under way be drawn again, each as the loop asks for it unless the engine goes on."""
        self.lists.is_on_demand = is_on_demand
        self.lists.give_back([job for job in self._jobs if job.number >= self.served])
        self._jobs.clear()

    def drop(self, engine: Engine) -> None:
        """Leave the epoch and forget what is under way, and so does an engine."""
        self.take_back(engine)
        self.feeding, self.ahead = False, None
        self._jobs.clear()
