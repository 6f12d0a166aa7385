"""Jobs from index lists, as iterators: an interruption would end a generator, but not these."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from accel.dataio.engine.engine import BatchJob, WorkerEpoch
from accel.dataio.fetching.randomness import derived_seed
from accel.dataio.passes import epochs
from accel.dataio.passes.epochs import Draws, States, same


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
        loader: whose sampler drew the lists.
        jobs: those of one epoch.
        before, after: states of the loader's own generators before the first was drawn, and after the last.
    """

    def __init__(self, loader: DataLoader[Any], jobs: list[BatchJob], before: States, after: States) -> None:
        self._loader, self._jobs, self._at, self._after = loader, deque(jobs), before, after

    def __iter__(self) -> Iterator[BatchJob]:
        return self

    def __next__(self) -> BatchJob:
        state = self._jobs[0].after if self._jobs else self._after
        if not same(state, self._at):
            self._at = state
            epochs.draw_as_exhausted(self._loader)
        if not self._jobs:
            raise StopIteration
        return self._jobs.popleft()
