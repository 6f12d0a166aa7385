"""Whole epochs made as a loader's own workers would make them, by workers that go on from epoch to epoch.

A `DataLoader` with workers starts them anew for each epoch, unless it has `persistent_workers`. Here they go on, and
fetch the next epoch's first batches while the loop is at the last ones of this epoch or validates. The bits are those
of the plain loader: index lists are drawn when it would draw them, batch n is made by worker n modulo their number, and
each worker begins each epoch with the random state, the `worker_init_fn` and the dataset that a new one would have.

What can't be had so is made by the plain loader. A pass that has begun here can go on there at any batch: an iterator
of the plain loader is begun under the random state of then, given the same index lists, and passes over the batches
that were handed out. That costs their making once more, and happens after failures, Ctrl-C, and in nested passes.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel.dataio.engine.engine import BatchJob, WorkerEpoch
from accel.dataio.engine.processes import ProcessEngine
from accel.dataio.passes import epochs
from accel.dataio.passes.epochs import Ahead
from accel.dataio.passes.index_lists import IndexLists, Jobs
from accel.dataio.passes.movable import not_continuable
from accel.dataio.passes.passes import EpochIterator, Skipping
from accel.dataio.passes.prefetch import PrefetchAcrossEpochs
from accel.profiler.interruptions import ours

# What batches are made by, and may be set anew between two epochs.
_OPTIONS = ("num_workers", "prefetch_factor", "worker_init_fn", "timeout", "multiprocessing_context", "pin_memory")


class OwnWorkers:
    """Workers that go on from epoch to epoch in place of a loader's own.

    Args:
        loader: map-style, with `num_workers` of at least 1.

    Raises:
        ValueError: if `not_continuable`.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        if reason := not_continuable(loader):
            raise ValueError(reason)
        self.loader = loader
        self._options = _options(loader)
        prefetch = loader.prefetch_factor or 2
        engine = ProcessEngine(loader, loader.num_workers, prefetch=prefetch, as_torch=True)
        self.continuous = _AsDrawnByWorkers(loader, engine)
        self._newest: weakref.ref[EpochIterator] | None = None

    def begin(self, running: EpochIterator, failed: Callable[[EpochIterator, Exception], bool]) -> bool:
        """Begin an epoch, as `iter(loader)` would; return False if nothing was drawn, and the plain loader has to.

        Args:
            running: the workers make its batches.
            failed: see `accel.dataio.passes.passes.BatchSource`.
        """
        if _options(self.loader) != self._options or not_continuable(self.loader):
            return False
        random_state = (self.loader.generator or torch.default_generator).get_state()
        running.attach(self.continuous, _whole_epoch)
        self._newest = weakref.ref(running)
        try:
            resumed = self.continuous.resume()
        except ours() as error:
            return failed(running, error)
        drawn = None
        if not resumed:
            self.continuous.drop()
            drawn = epochs.begin(self.loader)
        running.attach(self.continuous, partial(self._begun_again, drawn, random_state))
        try:
            if drawn is not None:
                self.continuous.take(drawn[0], base_seed=drawn[1])
            self.continuous.prime()
        except ours() as error:
            if not failed(running, error):
                raise
        return True

    def _begun_again(
        self,
        drawn: tuple[Iterator[Any], int] | None,
        random_state: torch.Tensor,
        running: EpochIterator,
        _: PrefetchAcrossEpochs,
    ) -> Iterator[Any]:
        """Return the plain loader's iterator, where the pass stands.

        Args:
            drawn: the index lists and the base seed; None if they were drawn ahead.
            random_state: of the generator that the base seed was drawn from, before that.
            running: goes on so.
        """
        lists = self.continuous.lists() if drawn is None or self.continuous.feeding else drawn[0]
        loader = _with_lists(self.loader, lists)
        loader.generator = torch.Generator()
        loader.generator.set_state(random_state)
        return Skipping(lambda: iter(loader), running.position)

    def rest(self) -> None:
        """Drop what was prefetched for an epoch that others will make."""
        running = None if self._newest is None else self._newest()
        if running is None or running.continuous is not self.continuous:
            self.continuous.drop()

    def close(self) -> None:
        """End the workers."""
        self.continuous.close()


def _options(loader: DataLoader[Any]) -> tuple[Any, ...]:
    return tuple(getattr(loader, name) for name in _OPTIONS)


def _whole_epoch(_: EpochIterator, continuous: PrefetchAcrossEpochs) -> Iterator[Any]:
    return iter(continuous.loader)


class _Lists:
    """A batch sampler of lists that were drawn before; torch asks it for an iterator twice."""

    def __init__(self, lists: Iterator[Any]) -> None:
        self._lists = lists

    def __iter__(self) -> Iterator[Any]:
        return self._lists


def _with_lists(loader: DataLoader[Any], lists: Iterator[Any]) -> DataLoader[Any]:
    other: DataLoader[Any] = object.__new__(type(loader))
    other.__dict__.update(loader.__dict__)
    other.__dict__["batch_sampler"] = _Lists(lists)
    return other


_TOKENS = itertools.count()


class _AsDrawnByWorkers(PrefetchAcrossEpochs):
    """Draws as a loader with workers does: early, and what was drawn stays so when the loop leaves the epoch.

    What the loop changes in the dataset within an epoch is not seen by workers that have begun it.
    """

    whole_epochs = True
    _errors_wait = False
    _fills_early_from = 1

    def __init__(self, loader: DataLoader[Any], engine: ProcessEngine) -> None:
        super().__init__(loader, engine)
        self._served_lists: list[Any] = []

    def lists(self) -> Iterator[Any]:
        """Return all index lists of the running epoch, and feed the workers no more."""
        return itertools.chain(self._served_lists[: self.served], self.left())

    def _jobs(self, lists: IndexLists, base_seed: int, epoch: int, first: int = 0, dataset: Any = None) -> Jobs:
        return Jobs(lists, None, epoch, first, dataset, WorkerEpoch(next(_TOKENS), base_seed))

    def _feed(self, indices: Iterator[Any], base_seed: int) -> None:
        super()._feed(indices, base_seed)
        self._served_lists = []

    def _begin(self, ahead: Ahead, source: Jobs) -> None:
        super()._begin(ahead, source)
        self._served_lists = []

    def _count_collected(self) -> None:
        job: BatchJob = self._record[self._collected]
        super()._count_collected()
        self._served_lists.append(job.indices)

    def _put_back(self) -> None:
        pass
