"""The jobs of an epoch: made of its index lists, given to an engine, and kept until the loop is past their batches.

    jobs:   collected, maybe in the loop's hands | the engine has them | drawn | those of the epoch drawn ahead
            ^ handed                             ^ served              ^ given

A job stays on record until the loop asks for a batch after it. So after Ctrl-C, wherever it came, the engine can make
again everything from `handed` on. All that changes when a batch is collected is one number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from accel.dataio.engine.engine import BatchJob, Engine
from accel.dataio.fetching.randomness import derived_seed
from accel.dataio.passes.epochs import Ahead, Draws, States, same
from accel.profiler.errors import AccelError
from accel.profiler.interruptions import ours

if TYPE_CHECKING:
    from accel.dataio.passes.not_ahead import AheadCheck


class ListLost(AccelError, RuntimeError):
    """An interruption came while the sampler drew an index list."""

    def __init__(self) -> None:
        super().__init__(
            "this pass can't go on: it was interrupted while the sampler drew an index list, which is lost; begin a "
            "new pass over the loader"
        )


class IndexLists:
    """Yields the index lists of an epoch, first those that were drawn before and given back.

    torch's `BatchSampler` reads its batch size at each list (with drop_last only when an epoch begins). A list that was
    given back after the loop has set it is as long as it would be drawn now.

    Args:
        loader: whose samplers yield the lists.
        indices: the lists.
        base_seed, dataset: see `number`.

    Attributes:
        draws: draws them.
        exhausted: no more can be drawn.
        next_number: of the next list in its epoch.
    """

    def __init__(
        self, loader: DataLoader[Any], indices: Iterator[Any], base_seed: int = 0, dataset: Any = None
    ) -> None:
        outer = loader._index_sampler
        self._batches = outer if type(outer) is BatchSampler and not outer.drop_last else None
        self._size = self._size_now  # of the lists drawn
        self._rest: list[Any] = []  # left over of a longer one
        self._is_uneven = False
        self.draws = indices if isinstance(indices, Draws) else Draws(loader, indices)
        self.exhausted = False
        self._is_drawing = False  # a list is on its way to whoever draws it; after an interruption it is lost
        self._seeds = loader.worker_init_fn is None
        self.number(base_seed, dataset=dataset)
        self._back: deque[BatchJob] = deque()
        self._states: tuple[States, States] | None = None
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        size = self._size_now
        self._is_uneven = self._is_uneven or size != self._size
        if not self._is_uneven:
            return self._next()
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
            job = self._back.popleft()
            self._draw_up_to(job.after)
            return job.indices
        if self._states is not None:
            self._draw_up_to(self._states[1])
            self._states = None
        if self._error is not None:
            raise self._error
        try:
            return _copied(next(self.draws))
        except StopIteration:
            self.exhausted = True
            raise
        except ours() as error:
            self._error = error
            raise

    def give_back(self, jobs: list[BatchJob], before: States | None, after: States) -> None:
        """Take back lists that were drawn and not used.

        Args:
            jobs: with these lists, oldest first.
            before, after: states of the loader's own generators before the first of them was drawn and after the last:
                they were put back, and are drawn through again. `before` is None if they were not.
        """
        self._dataset = None
        if jobs:
            self.next_number = jobs[0].number
        if self._rest:
            jobs = [*jobs, BatchJob(self._rest, None, after)]
            self._rest = []
        self._back.extendleft(reversed(jobs))
        self._is_uneven, self._size = self._is_uneven or self.has_new_size, self._size_now
        if before is not None:
            self._states = before, after if self._states is None else self._states[1]
        self.exhausted = self.exhausted and not self._back and self._states is None

    @property
    def _size_now(self) -> int:
        return 0 if self._batches is None else self._batches.batch_size

    @property
    def has_new_size(self) -> bool:
        """Whether the loop has set another batch size since lists were drawn."""
        return self._size_now != self._size

    def _draw_up_to(self, state: States) -> None:
        if self._states is None:
            return
        at, last = self._states
        if not same(state, at):
            self.draws.draw_again(at, state)
        self._states = state, last

    # -- as jobs -----------------------------------------------------------------------------------

    def number(self, base_seed: int, first: int = 0, dataset: Any = None) -> None:
        """Make jobs of the lists from now on.

        Args:
            base_seed: of the epoch's random numbers, which are left alone where a worker_init_fn may set them.
            first: number of the next list in its epoch.
            dataset: to fetch from until lists are given back, see `BatchJob`.
        """
        self.base_seed, self.next_number, self._dataset = base_seed, first, dataset

    def next_job(self, take: Callable[[BatchJob], Any]) -> bool:
        """Hand the next list to `take`, as a job, and return whether there was one.

        Raises:
            ListLost: if one was lost before.
        """
        if self._is_drawing:
            raise ListLost
        self._is_drawing = True
        try:
            indices, number = next(self), self.next_number
            seed = derived_seed(self.base_seed, number) if self._seeds else None
            take(BatchJob(indices, seed, self.draws.generators(), self._dataset, number))
            self.next_number = number + 1
        except StopIteration:
            self._is_drawing = False
            return False
        except ours():
            self._is_drawing = False
            raise
        self._is_drawing = False
        return True


def _copied(indices: Any) -> Any:
    """Return an index list that stays as it is: a sampler may yield the same one again and again, filled anew."""
    if type(indices) is list or isinstance(indices, np.ndarray):
        return indices.copy()
    return indices.clone() if isinstance(indices, Tensor) else indices


class EpochJobs:
    """The jobs of one epoch, and where each of them is.

    Args:
        lists: the epoch's index lists.
        ahead: what must hold when the epoch begins, where it has not begun.
        may_look_ahead: see the attribute.

    Attributes:
        served: number of the next batch to be collected.
        handed: number of the first batch that the loop has not got; set by whoever hands them over.
        failed: the next batch could not be made, and the engine has its job no more.
        feeding: lists are drawn; False drains the engine: it returns what is under way, and then the epoch ends.
        ended: the loop has been told that there are no more batches.
        ahead: of an epoch drawn ahead, until its lists count.
        following: the next epoch, once it is drawn ahead.
        may_look_ahead: it may be drawn, once all lists of this one are.
        sampler_error: raised when a list was drawn.
    """

    def __init__(self, lists: IndexLists, ahead: Ahead | None = None, *, may_look_ahead: bool = True) -> None:
        self.lists, self.ahead, self.may_look_ahead = lists, ahead, may_look_ahead
        self._jobs: deque[BatchJob] = deque()
        self.served = self.handed = self._given = lists.next_number
        self.feeding, self.failed, self.ended = True, False, False
        self.following: EpochJobs | None = None
        self.sampler_error: Exception | None = None
        # States of the loader's own generators: after all that was drawn, and after what the batches handed over took.
        self._drawn: States = lists.draws.generators()
        self._after_handed: States = self._drawn if ahead is None else ahead.began[1:]

    @property
    def _after(self) -> States:
        """States of the loader's own generators after what was drawn for the batches collected."""
        if self._jobs and self._jobs[0].number < self.served:
            return self._jobs[self.served - self._jobs[0].number - 1].after
        return self._after_handed

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

        A loop that leaves with the last batch does not ask for one more, which is when the sampler may draw once more.
        """
        return self.waiting == 0 and (self.ended or same(self._drawn, self._after))

    @property
    def others_drew(self) -> bool:
        """Whether somebody else has drawn from the loader's own generators since a list was drawn."""
        return not self.ended and not same(self.lists.draws.generators(), self._drawn)

    def draw(self) -> bool:
        """Draw the next list, of the epoch that follows once there is one; return whether there was a list."""
        if self.following is not None:
            return self.following.draw()
        if self.lists.exhausted:
            return False
        try:
            drawn = self.lists.next_job(self._jobs.append)
        except ours() as error:
            self.sampler_error = error
            raise
        self._drawn = self._jobs[-1].after if drawn else self.lists.draws.generators()
        return drawn

    def give(self, engine: Engine, check: AheadCheck, most: int) -> int:
        """Give an engine jobs until it has `most`, the oldest first; return how many more it may have."""
        end = self.served + min(most, self.waiting)
        while self._given < end:
            job = self._jobs[self._given - self._jobs[0].number]
            engine.submit(job._replace(watch=check.watch) if check.strict else job)
            self._given += 1
        room = most - self.waiting
        return room if self.following is None else self.following.give(engine, check, room)

    def take_back(self, engine: Engine) -> None:
        """Have an engine forget the jobs that it has; it gets those of this epoch again, of the dataset as it is."""
        self._jobs = deque(job._replace(dataset=None) for job in self._jobs)
        self.lists.number(self.lists.base_seed, self.lists.next_number)
        if self._given > self.served + self.failed or self.following is not None:
            engine.discard()
        self._given, self.failed, self.following = self.served, False, None

    def move_on(self) -> None:
        """Forget the batches handed over, as the loop asks for another, and pass over one that could not be made."""
        if self.failed:
            self.failed = False
            self.served += 1
        while self._jobs and self._jobs[0].number < self.handed:
            self._after_handed = self._jobs[0].after
            self._jobs.popleft()

    def go_back(self) -> None:
        """Begin again with the first batch that the loop has not got; the engine has no jobs any more."""
        self.move_on()
        self.served = self._given = self.handed
        self.failed = self.may_look_ahead = False
        self.following = None

    def give_lists_back(self) -> None:
        """Have the lists under way be drawn again, and the generators be as if they had not been drawn."""
        before, after = self._after, self._drawn
        if open_end := self.feeding and not self.ended:
            self.put_back()
        pending = [job for job in self._jobs if job.number >= self.served]
        self.lists.give_back(pending, before if open_end else None, after)
        self._drawn = before  # what is not put back counts as drawn
        self._jobs = deque(job for job in self._jobs if job.number < self.served)

    def put_back(self) -> None:
        """Have generators be as the batches that were served had left them: the loop has left the epoch."""
        if not self.ended:
            self.lists.draws.put_back(self._drawn, self._after)
            self._drawn = self._after  # once: an older pass may draw what leads to the same state

    def drop(self, engine: Engine) -> None:
        """Leave the epoch and forget what is under way, and so does an engine."""
        self.put_back()
        self.take_back(engine)
        self.feeding, self.ahead = False, None
        self._jobs = deque(job for job in self._jobs if job.number < self.served)
