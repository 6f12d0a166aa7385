"""The index lists of one epoch, as jobs for an engine; those that were drawn early can be given back."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler

from accel.dataio.engine.engine import BatchJob
from accel.dataio.fetching.randomness import derived_seed
from accel.dataio.passes.epochs import Draws, States, ordering, same
from accel.profiler.errors import AccelError
from accel.profiler.interruptions import ours


class ListLost(AccelError, RuntimeError):
    """An interruption came while the sampler drew an index list."""

    def __init__(self) -> None:
        super().__init__(
            "this pass can't go on: it was interrupted while the sampler drew an index list, which is lost; begin a "
            "new pass over the loader"
        )


class IndexLists:
    """Yields the index lists of an epoch, first those that were drawn before and given back.

    `BatchSampler` reads its batch size at each list (with drop_last only when an epoch begins), `SubsetRandomSampler`
    its indices. A list that was given back after the loop has set them is as it would be drawn now.

    Args:
        loader: whose samplers yield the lists.
        draws: draws them.

    Attributes:
        exhausted: no more can be drawn.
    """

    def __init__(self, loader: DataLoader[Any], draws: Draws) -> None:
        self.draws, self.exhausted = draws, False
        self._is_drawing = False  # a list is on its way to whoever draws it; after an interruption it is lost
        self.number(0, None)
        self._back: deque[BatchJob] = deque()
        self._states: tuple[States, States] | None = None
        self._error: Exception | None = None
        outer, sampler = loader._index_sampler, ordering(loader)
        self._batches = outer if type(outer) is BatchSampler and not outer.drop_last else None
        self._subset = sampler if type(sampler) is SubsetRandomSampler else None
        self._rest, self._is_uneven = list[Any](), False
        self._follow()

    def _follow(self) -> None:
        self._size = self._size_now
        chosen: Any = () if self._subset is None else self._subset.indices
        self._chosen: Any = list(chosen) if isinstance(chosen, list) else copy.deepcopy(chosen)

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
            return job.indices if self._subset is None else [self._subset.indices[place] for place in job.indices]
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
        if self._rest:
            jobs = [*jobs, BatchJob(self._rest, None, after)]
            self._rest = []
        if self._subset is not None:
            places = {int(index): place for place, index in enumerate(self._chosen)}
            jobs = [job._replace(indices=[places[int(index)] for index in job.indices]) for job in jobs]
        self._back.extendleft(reversed(jobs))
        self._is_uneven = self._is_uneven or self._size_now != self._size
        self._follow()
        if before is not None:
            self._states = before, after if self._states is None else self._states[1]
        self.exhausted = self.exhausted and not self._back and self._states is None

    def _draw_up_to(self, state: States) -> None:
        if self._states is None:
            return
        at, last = self._states
        if not same(state, at):
            self.draws.draw_again(at, state)
        self._states = state, last

    # -- as jobs -----------------------------------------------------------------------------------

    def number(self, epoch: int, base_seed: int | None, first: int = 0, dataset: Any = None) -> None:
        """Make jobs of the lists from now on.

        Args:
            epoch: its number among the epochs drawn so far.
            base_seed: of the epoch's random numbers; None to leave them alone.
            first: number of the next list in its epoch.
            dataset: to fetch from, see `BatchJob`.
        """
        self._epoch, self._base_seed, self._number, self._dataset = epoch, base_seed, first, dataset

    def next_job(self, take: Callable[[BatchJob], Any]) -> bool:
        """Hand the next list to `take`, as a job, and return whether there was one.

        Raises:
            ListLost: if one was lost before.
        """
        if self._is_drawing:
            raise ListLost
        self._is_drawing = True
        try:
            indices, number = next(self), self._number
            seed = None if self._base_seed is None else derived_seed(self._base_seed, number)
            take(BatchJob(indices, seed, self.draws.generators(), self._dataset, self._epoch, number))
            self._number = number + 1
        except StopIteration:
            self._is_drawing = False
            return False
        except ours():
            self._is_drawing = False
            raise
        self._is_drawing = False
        return True

    # -- what the loop sets ------------------------------------------------------------------------

    @property
    def _size_now(self) -> int:
        return 0 if self._batches is None else self._batches.batch_size

    def changed(self) -> bool:
        """Return whether the loop has set something in a sampler, by which lists would be others."""
        if self._size_now != self._size or self._subset is None:
            return self._size_now != self._size
        now: Any = self._subset.indices
        if isinstance(now, Tensor) and isinstance(self._chosen, Tensor):
            return not torch.equal(now, self._chosen)
        return not np.array_equal(now, self._chosen) if isinstance(now, np.ndarray) else bool(now != self._chosen)


def _copied(indices: Any) -> Any:
    """Return an index list that stays as it is: a sampler may yield the same one again and again, filled anew."""
    if type(indices) is list or isinstance(indices, np.ndarray):
        return indices.copy()
    return indices.clone() if isinstance(indices, Tensor) else indices
