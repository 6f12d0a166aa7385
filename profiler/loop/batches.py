"""Marks on the loaders: which batches are for training, and where a step begins with the request for one."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping
from threading import get_ident
from typing import Any

import torch

from accel.profiler.loop.clock import FIRST, MAYBE_DATA, MAYBE_HOST, SETTLED, STEP
from accel.profiler.loop.delivery import Delivery
from accel.profiler.loop.patches import Function


class LoaderMarks:
    """Marks on the loaders.

    Args:
        delivery: of the steps.
        tape: where the quickest marks go.
        is_called: returns whether a call of the loop's model has been marked.

    Attributes:
        ahead: True fetches the batches of the open step while its clock is stopped.
        drain: waits until a GPU has done its work, and returns the seconds.
        since_batch: updates since the last batch was asked for.
        training: the loaders that are known to feed the training, as long as they live.
        has_training: there is one, or was.
        recent: since the last backward pass, the loaders that batches came from; None for a call that it has to place.
        pending: the iterators among them whose loaders are not known to feed the training, and the samples to count.
        is_doubtful: a call without gradients came since then that may be an evaluation.
    """

    def __init__(self, delivery: Delivery, tape: Any, is_called: Callable[[], bool]) -> None:
        self._clock, self._tape, self.thread, self._is_called = delivery.clock, tape, delivery.thread, is_called
        self._delivery, self._hot, self._pauses = delivery, delivery.hot, delivery.pauses
        self.ahead = False
        self.drain: Callable[[], float] = lambda: 0.0
        self.fetched = self.since_batch = 0
        self.loader: Any = None
        self.collating = CollateTimer(delivery.clock.now)
        self.training: weakref.WeakSet[Any] = weakref.WeakSet()
        self.has_training = False
        self.recent: list[Any] = []
        self._iterator: Callable[[], Any] = lambda: None
        self.pending: list[tuple[Any, int | None]] = []
        self.is_doubtful = False
        self._starts_epoch = False

    def iterating(self, original: Function) -> Function:
        """Mark the making of an iterator; for the training loader this is the beginning of an epoch."""

        @functools.wraps(original)
        def marked(loader: Any) -> Any:
            return original(loader) if get_ident() != self.thread else self._iterate(loader, original)

        return marked

    def _iterate(self, loader: Any, original: Function) -> Any:
        self._begin_pass(loader)
        opened = self._clock.code
        try:
            iterator = original(loader)
        finally:
            self._clock.enter({"data": "host", MAYBE_DATA: MAYBE_HOST}.get(opened, "evaluation"))
        with contextlib.suppress(AttributeError):  # a generator, around an iterator that is marked itself
            iterator._accel_loader, iterator._accel_begun, iterator._accel_evaluates = loader, False, False
        if iterator is self.iterator:  # persistent workers reuse the iterator, which must be adopted anew
            self._forget_iterator()
        return iterator

    def making(self, original: Function) -> Function:
        """Mark the making of torch's own iterators: a loader's class may make them in an `__iter__` of its own."""

        @functools.wraps(original)
        def marked(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            iterator._accel_loader = loader
            if get_ident() == self.thread:
                self._begin_pass(loader)
            original(iterator, loader, *args, **kwargs)

        return marked

    def _begin_pass(self, loader: Any) -> None:
        if self.is_doubtful:
            self.settle(within=False)
        if not _may_train(self, loader):
            self._begin_other(maybe_training=torch.is_grad_enabled())
            return
        self._clock.enter("data")
        if self._hot.stepped:  # starting an epoch is part of its first step
            self._delivery.boundary()
        self._pauses.end()

    def _begin_other(self, *, maybe_training: bool) -> None:
        """Mark that a loader is asked for a pass or a batch that is not known to feed the training.

        That is an evaluation, unless a backward pass comes of it: then a step begins here, as in a loop that makes its
        loader anew in each epoch.
        """
        self._clock.enter(MAYBE_DATA if maybe_training else "evaluation")
        if maybe_training and self._hot.stepped:
            self._delivery.boundary()
        self._hot.iterator = None  # the training's next batch takes the slow path
        self._pauses.begin()

    def fetching(self, original: Function) -> Function:
        """Mark the fetching of a batch."""
        tape, now, hot = self._tape, self._clock.now, self._hot

        @functools.wraps(original)
        def marked(iterator: Any) -> Any:
            if iterator is not hot.iterator:
                return original(iterator) if get_ident() != self.thread else self._fetch(iterator, original)
            tape.append("data")
            tape.append(now())
            if hot.stepped:
                hot.stepped = False
                tape.append(STEP)
                tape.append(None)
                hot.steps_left -= 1
                if hot.steps_left <= 0:
                    self._delivery.deliver()  # a segment's first batch takes the slow path, which counts it
                    return self._fetch(iterator, original)
            following = "host"
            try:
                batch = original(iterator)
            except StopIteration:
                following, hot.iterator = "outside", None
                raise
            finally:
                tape.append(following)
                tape.append(now())
            return batch

        return marked

    def _fetch(self, iterator: Any, original: Function) -> Any:
        """Fetch a batch by the slow path."""
        clock, self.since_batch = self._clock, 0
        if self.is_doubtful:
            self.settle(within=False)
        if iterator is not self.iterator and not self._adopt(iterator):
            return self._fetch_other(iterator, original)
        clock.enter("data")
        if self._hot.stepped:
            self._delivery.boundary()
        self._pauses.end()
        counting = self._hot.counting  # a step's batches are counted all or none
        self._hot.iterator = None if self.ahead or counting or not self._is_called() else iterator
        if self._starts_epoch:
            self._starts_epoch = False
            clock.write(FIRST)
        following = "host" if self._is_called() else "forward"  # forward: no call of a model is marked yet
        if self.ahead and self.drain() > 0:  # what the device does beside the fetching would be off the clock too
            clock.enter("data")
        try:
            batch = self.collating.fetch(iterator, original)
        except StopIteration:
            following, self._hot.iterator = "outside", None
            raise
        finally:
            if self.ahead:
                clock.skip()
            clock.enter(following)
            if following == "outside":
                self._pauses.begin()
        if counting:
            clock.count(samples_in(batch))
        self.fetched += 1
        return batch

    def _fetch_other(self, iterator: Any, original: Function) -> Any:
        # An iterator that was made before recording began has no loader.
        could_train = hasattr(iterator, "_accel_loader") and not getattr(iterator, "_accel_evaluates", False)
        maybe_training = could_train and torch.is_grad_enabled()
        self._begin_other(maybe_training=maybe_training)
        try:
            batch = original(iterator)
        except StopIteration:
            self.settle(within=False)  # a whole pass, and no backward pass came of it
            raise
        if maybe_training:
            self._clock.enter(MAYBE_HOST)
            if not any(iterator is other for other, _ in self.pending):
                self.recent.append(iterator._accel_loader)
                self.pending.append((iterator, samples_in(batch) if self._hot.counting else None))
        return batch

    def settle(self, *, within: bool) -> None:
        """Decide whether what is provisional belongs to the open step or to an evaluation."""
        pending, self.pending, self.is_doubtful = self.pending, [], False
        self._clock.write((SETTLED, within))
        if not within:
            self.recent.clear()
            for iterator, _ in pending:
                iterator._accel_evaluates = True  # for the rest of its pass
            return
        for iterator, count in pending:
            self._take(iterator, iterator._accel_loader)
            self.fetched += 1
            if count is not None:
                self._clock.count(count)
            if self._starts_epoch:
                self._starts_epoch = False
                self._clock.write(FIRST)

    def _adopt(self, iterator: Any) -> bool:
        """Make an iterator the loop's own if it belongs to a training loader; return whether it does."""
        loader = getattr(iterator, "_accel_loader", None)
        if loader is None or not _may_train(self, loader):
            return False
        self.recent.append(loader)
        self._take(iterator, loader)
        return True

    def _take(self, iterator: Any, loader: Any) -> None:
        def gone(dropped: weakref.ref[Any]) -> None:
            if dropped is self._iterator:  # a `for` was left by `break`
                self._pauses.begin()

        self.loader, self._iterator = loader, weakref.ref(iterator, gone)
        self._starts_epoch = not getattr(iterator, "_accel_begun", False)  # two loaders may deliver by turns
        iterator._accel_begun = True

    def lose(self) -> None:
        """Forget the loader: the loop iterates over batches that it took from it earlier, so it ends no steps."""
        self.training.clear()
        self.has_training, self.loader = False, None
        self._forget_iterator()

    def _forget_iterator(self) -> None:
        self._iterator, self._hot.iterator = lambda: None, None

    @property
    def iterator(self) -> Any:
        """The loop's own iterator, None once the loop has dropped it: kept alive, it would keep its workers."""
        return self._iterator()


def _may_train(marks: LoaderMarks, loader: Any) -> bool:
    """Return whether a loader feeds the training; as long as none is known, with gradients each may."""
    return loader in marks.training if marks.has_training else torch.is_grad_enabled()


class CollateTimer:
    """Fetches batches, and times the collate function."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._now = clock
        self._collate_s = self._fetch_s = 0.0

    @property
    def share(self) -> float:
        """Share of the fetching so far."""
        return self._collate_s / self._fetch_s if self._fetch_s else 0.0

    def fetch(self, iterator: Any, original: Callable[[Any], Any]) -> Any:
        """Fetch a batch from a loader's iterator by its own `__next__`."""
        fetcher = getattr(iterator, "_dataset_fetcher", None)
        collate = getattr(fetcher, "collate_fn", None)
        if fetcher is None or collate is None:
            return original(iterator)

        def timed(samples: Any) -> Any:
            began = self._now()
            try:
                return collate(samples)
            finally:
                self._collate_s += self._now() - began

        began = self._now()
        fetcher.collate_fn = timed
        try:
            return original(iterator)
        finally:
            fetcher.collate_fn = collate
            self._fetch_s += self._now() - began


def samples_in(batch: Any) -> int:
    """Return the first dimension of the first tensor in a batch, 0 if there is none."""
    if type(batch) in (list, tuple) and batch and type(batch[0]) is torch.Tensor:  # the usual case; the rest costs 1 µs
        return batch[0].shape[0] if batch[0].dim() else 0
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 0
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, tuple | list):
        for part in batch:
            size = samples_in(part)
            if size:
                return size
    return 0
