"""The loader the loop gets back: the user's own, with ears.

`LoaderProxy` answers everything as the loader it stands for (`len`, `dataset`, `batch_size`, `isinstance`, operators),
tells a listener when a batch is asked for and handed over, and can have its batches fetched by another engine from one
batch to the next, in the same order. Without a listener it *is* the plain loader.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.data import DataLoader

from accel.dataio.batches import equal
from accel.dataio.dataset.fetch_watch import FetchWatch
from accel.dataio.passes.continuous import Continuous
from accel.dataio.passes.stand_in import StandIn

if TYPE_CHECKING:
    from accel.dataio.passes.own_workers import OwnWorkers


class LoaderListener(Protocol):
    """What a loader proxy tells."""

    def epoch_begins(self) -> None:
        """The loop has asked for an iterator."""

    def batch_requested(self) -> None:
        """The loop asks for a batch: the code of the step before it has run to its end."""

    def batch_delivered(self, batch: Any) -> None:
        """A batch is about to be handed over."""

    def epoch_ended(self) -> None:
        """The loader has no more batches in this epoch."""

    def fetching_failed(self, error: Exception) -> None:
        """Worker processes failed; the proxy fetches plainly from here on, from the very batch that failed."""


class Fetching:
    """How the proxy gets its batches; strategies change it between two batches.

    Attributes:
        workers: what fetches ahead, or None to fetch as the plain loader does.
        own_workers: what makes whole epochs in place of the loader's own workers, or None.
        transforms: functions applied to each batch, in order.
        running: returns the newest pass, the only one whose batches `workers` may make.
        witness: watches plain fetches, or None.
    """

    def __init__(self) -> None:
        self.workers: Continuous | None = None
        self.own_workers: OwnWorkers | None = None
        self.running: Callable[[], _Epoch | None] = lambda: None
        self.transforms: dict[str, Callable[[Any], Any]] = {}
        self.witness: FetchWatch | None = None


class LoaderProxy(StandIn):
    """Stand for `loader` and tell `listener` what the loop does with it.

    Args:
        loader: any iterable; a `torch.utils.data.DataLoader` can also have its fetching changed.
        listener: told of requests and batches; None makes the proxy a plain pass-through.
    """

    __slots__ = ("_accel_fetching", "_accel_listener")

    def __init__(self, loader: Any, listener: LoaderListener | None = None) -> None:
        super().__init__(loader)
        object.__setattr__(self, "_accel_listener", listener)
        object.__setattr__(self, "_accel_fetching", Fetching())

    def __repr__(self) -> str:
        return f"accel({self._accel_loader!r})"

    def __iter__(self) -> Iterator[Any]:
        if self._accel_listener is None:
            return iter(self._accel_loader)
        return _Epoch(self._accel_loader, self._accel_fetching, self._accel_listener)


def is_proxy(loader: Any) -> bool:
    """Tell whether `loader` is a `LoaderProxy` (its `__class__` is that of the loader it stands for)."""
    return issubclass(type(loader), LoaderProxy)


class _Epoch:
    """One pass over the loader, as an iterator."""

    def __init__(self, loader: Any, fetching: Fetching, listener: LoaderListener) -> None:
        self._fetching = fetching
        self._listener = listener
        listener.epoch_begins()
        self._delivered = 0
        self._workers: Continuous | None = None
        self._loader = loader
        self._plain: Any = None
        self._stream: Iterator[Any] | None = None
        active = fetching.workers
        self._take_over()
        if active is not None:
            if active.resume():
                self._workers = active
                return
            active.drop()  # before anything is drawn: it puts the generators back
        self._plain = self._whole_epoch()
        self._stream = getattr(self._plain, "_sampler_iter", None)
        # The first index list also draws the sampler's seed: that one is not the dataset's doing.
        self._watch_from = 1
        self._served = 0

    def _whole_epoch(self) -> Any:
        """Return the plain iterator, or what stands in for it in this epoch."""
        own = self._fetching.own_workers
        epoch = None if own is None else own.begin(self._own_workers_failed)
        return iter(self._loader) if epoch is None else epoch

    def _own_workers_failed(self, error: Exception) -> None:
        self._fetching.own_workers = None
        self._listener.fetching_failed(error)

    def _take_over(self) -> None:
        """Have an older pass that is still under way, as in nested loops, go on without the workers."""
        older = self._fetching.running()
        if older is not None and older._workers is not None:
            older._leave_workers()
        self._fetching.running = weakref.ref(self)

    def __del__(self) -> None:
        workers = self.__dict__.get("_workers")
        if workers is not None and not sys.is_finalizing():
            workers.leave()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        delivered = self._delivered
        try:
            return self._next()
        except Exception:
            raise
        except BaseException:
            self._delivered = delivered
            if self._workers is not None:
                self._workers.give_back(delivered)
            raise

    def _next(self) -> Any:
        self._listener.batch_requested()
        try:
            batch = self._fetch()
        except StopIteration:
            self._listener.epoch_ended()
            raise
        for transform in self._fetching.transforms.values():
            batch = transform(batch)
        self._delivered += 1
        self._listener.batch_delivered(batch)
        return batch

    def _fetch(self) -> Any:
        wanted = self._fetching.workers
        if wanted is not None and self._fetching.running() is not self:
            wanted = None
        if self._workers is not None:
            if wanted is not self._workers:
                self._workers.close_feed()
            try:
                return self._workers.fetch()
            except StopIteration:
                if wanted is self._workers and self._workers.feeding:
                    raise  # the epoch is over; workers that were only drained, and are wanted again, go on below
                self._leave_workers()
            except Exception as error:
                # Fetched again in this process, a broken sample raises the dataset's own error.
                failed = self._workers
                self._leave_workers()
                failed.close()
                wanted = self._fetching.workers = None
                self._listener.fetching_failed(error)
        if wanted is not None and self._stream is not None:
            wanted.take(self._stream, base_seed=self._plain._base_seed, first=self._delivered)
            self._workers = wanted
            return self._fetch()
        return self._plain_fetch()

    def _leave_workers(self) -> None:
        """Go back to the plain iterator, which goes on where the workers end."""
        workers, self._workers = self._workers, None
        assert workers is not None
        if self._plain is None:
            self._plain, self._served, self._watch_from = _quiet_iter(self._loader), 1, 1
        self._stream = self._plain._sampler_iter = workers.left()

    def _plain_fetch(self) -> Any:
        witness = self._fetching.witness
        if witness is None or self._served < self._watch_from:
            self._served += 1
            return next(self._plain)
        witness.before()
        batch = next(self._plain)
        witness.after()
        self._served += 1
        return batch


def _quiet_iter(loader: Any) -> Any:
    """Return a plain iterator of `loader` without drawing from its generator, or torch's own."""
    import torch

    own = loader.generator
    loader.generator = torch.Generator()  # the base seed is drawn here, the sampler's order with its first list
    try:
        return iter(loader)
    finally:
        loader.generator = own


def same_as_plain(loader: DataLoader[Any], workers: Continuous) -> bool:
    """Fetch the dataset's first samples through `workers` and plainly, and tell whether the bits agree.

    A batch of the loader's own size is taken from the front of the dataset; no sampler and no random state is touched.
    """
    count = min(len(loader.dataset), loader.batch_size or 1)  # type: ignore[arg-type]
    indices = list(range(count))
    workers.take(iter([indices]), ahead=False)
    try:
        moved = workers.fetch()
    finally:
        workers.close_feed()
    plain = loader.collate_fn(_samples(loader.dataset, indices))
    return equal(moved, plain)


def _samples(dataset: Any, indices: list[int]) -> list[Any]:
    if hasattr(dataset, "__getitems__") and dataset.__getitems__:
        return list(dataset.__getitems__(indices))
    return [dataset[index] for index in indices]
