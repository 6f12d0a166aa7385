"""Jobs from index lists, as iterators: an interruption would end a generator, but not these."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import numpy as np
from torch import Tensor

from accel.dataio.engine.engine import BatchJob, WorkerEpoch
from accel.dataio.fetching.randomness import derived_seed
from accel.dataio.passes.epochs import Draws, States, same
from accel.dataio.passes.live_sampler import LiveSampler


class Jobs:
    """Yields a job for each index list of an epoch.

    Args:
        draws: the index lists.
        base_seed: of the epoch's random numbers; None to leave them alone.
        epoch: its number among the epochs drawn so far.
        first: number of the first list in its epoch.
        dataset: to fetch from, see `BatchJob`.
        worker_epoch: for workers that stand in for a `DataLoader`'s own.
    """

    def __init__(
        self,
        draws: Draws,
        base_seed: int | None,
        epoch: int,
        first: int = 0,
        dataset: Any = None,
        worker_epoch: WorkerEpoch | None = None,
    ) -> None:
        self._draws, self._base_seed, self._epoch, self._dataset = draws, base_seed, epoch, dataset
        self._number, self._worker_epoch = first, worker_epoch

    def __iter__(self) -> Iterator[BatchJob]:
        return self

    def __next__(self) -> BatchJob:
        indices = _kept(next(self._draws))
        number = self._number
        self._number += 1
        seed = None if self._base_seed is None else derived_seed(self._base_seed, number)
        states = self._draws.generators()
        return BatchJob(indices, seed, states, self._dataset, self._epoch, number, self._worker_epoch)


def _kept(indices: Any) -> Any:
    """Return an index list that stays as it is: a sampler may yield the same one again and again, filled anew."""
    if type(indices) is list:
        return indices.copy()
    if isinstance(indices, np.ndarray):
        return indices.copy()
    return indices.clone() if isinstance(indices, Tensor) else indices


class ListLost(RuntimeError):
    """An interruption came while the sampler drew an index list."""

    def __init__(self) -> None:
        super().__init__(
            "this pass can't go on: it was interrupted while the sampler drew an index list, which is lost; begin a "
            "new pass over the loader"
        )


class NoMoreLists:
    """In place of index lists that can't be drawn: raises `error`."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __iter__(self) -> Iterator[BatchJob]:
        return self

    def __next__(self) -> BatchJob:
        raise self._error


class AsDrawn:
    """Yields jobs whose lists were drawn early, and draws when they come what was put back of that.

    Args:
        draws: drew the lists.
        jobs: those of one epoch.
        before, after: states of the loader's own generators before the first was drawn, and after the last.
    """

    def __init__(self, draws: Draws, jobs: list[BatchJob], before: States, after: States) -> None:
        self._draws, self._jobs, self._at, self._after = draws, deque(jobs), before, after

    def __iter__(self) -> Iterator[BatchJob]:
        return self

    def __next__(self) -> BatchJob:
        state = self._jobs[0].after if self._jobs else self._after
        if not same(state, self._at):
            self._draws.draw_again(self._at, state)
            self._at = state
        if not self._jobs:
            raise StopIteration
        return self._jobs.popleft()


class LeftLists:
    """Yields index lists that are left of an epoch: first those that were drawn and not served.

    A loader may be switched to other workers and back again and again: each time some more come before the others.
    If the loop sets another batch size meanwhile, the lists are of that.

    Args:
        live: the sampler under which those were drawn; None to leave lists as they are.
        drawn: yields the jobs of those that were drawn.
        later: yields the lists after them.
    """

    def __init__(self, live: LiveSampler | None, drawn: Iterable[BatchJob], later: Iterator[Any]) -> None:
        self._drawn, self._later, self._rest = deque[Iterator[Any]](), later, list[Any]()
        self.put_first(live, drawn)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._live is None or not self._live.batch_size:
            return self._next_list()
        while len(self._rest) < (size := self._live.batch_size):
            try:
                self._rest += self._next_list()
            except StopIteration:
                break
        indices, self._rest = self._rest[:size], self._rest[size:]
        if not indices:
            raise StopIteration
        return indices

    def _next_list(self) -> Any:
        while self._drawn:
            for indices in self._drawn[0]:
                return indices
            self._drawn.popleft()
        return next(self._later)

    def put_first(self, live: LiveSampler | None, drawn: Iterable[BatchJob]) -> LeftLists:
        """Return itself, with more that were drawn and not served."""
        if self._rest:
            self._drawn.appendleft(iter([self._rest]))
        self._live, self._rest = live, []
        lists = map(attrgetter("indices"), drawn)
        self._drawn.appendleft(lists if live is None else map(live.now, lists))
        return self


def lists_left(
    live: LiveSampler | None, lists: Iterator[Any], drawn: Iterable[BatchJob], later: Iterator[BatchJob]
) -> LeftLists:
    """Return the index lists of jobs; those that are left of `lists` already, without wrapping them once more.

    Args:
        live: see `LeftLists`.
        lists: that the jobs were made from.
        drawn: jobs that were drawn and not served.
        later: yields those after them.
    """
    if not isinstance(later, Jobs):
        return LeftLists(live, drawn, map(attrgetter("indices"), later))
    return lists.put_first(live, drawn) if isinstance(lists, LeftLists) else LeftLists(live, drawn, lists)
