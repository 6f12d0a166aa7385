"""All that observe one loader: the sessions of a GAN's two models, say, whose batches come from the same place."""

from __future__ import annotations

from typing import Any


class LoopObserver:
    """Hears what the loop does with a loader; subclasses override what they act on.

    A loader is known by its stand-in (`accel.dataio.passes.proxy.LoaderProxy`), which has a place for a listener.
    """

    fetching: Any = None
    """How the stand-in's batches are fetched, if this observer may change it."""

    def epoch_begins(self, proxy: Any) -> None:
        """The loop has asked for an iterator."""

    def batch_requested(self) -> None:
        """The loop asks for a batch."""

    def batch_delivered(self, batch: Any, proxy: Any) -> None:
        """A batch of this loader is about to be handed over."""

    def epoch_ended(self, proxy: Any) -> None:
        """The loader has no more batches in this epoch."""

    def fetching_failed(self, error: Exception) -> None:
        """The observer's own way of fetching failed; the loader fetches plainly again, and no batch is lost."""


class Observers:
    """Tell each observer what the loop does with one loader, in the order in which they came."""

    def __init__(self, proxy: Any) -> None:
        self._proxy = proxy
        self.set(())

    def set(self, observers: tuple[LoopObserver, ...]) -> None:
        """Have these observers from now on."""
        # New tuples at each change, so that a loop over the old ones may change them. What an observer has not
        # overridden is not called for each batch.
        requested = tuple(each.batch_requested for each in _overriding("batch_requested", observers))
        delivered = tuple(each.batch_delivered for each in _overriding("batch_delivered", observers))
        self.all, self._requested, self._delivered = observers, requested, delivered  # Ctrl-C: all or none

    def epoch_begins(self) -> None:
        """The loop has asked for an iterator."""
        for observer in self.all:
            observer.epoch_begins(self._proxy)

    def batch_requested(self) -> None:
        """The loop asks for a batch."""
        for requested in self._requested:
            requested()

    def batch_delivered(self, batch: Any) -> None:
        """A batch is about to be handed over."""
        for delivered in self._delivered:
            delivered(batch, self._proxy)

    def epoch_ended(self) -> None:
        """The loader has no more batches in this epoch."""
        for observer in self.all:
            observer.epoch_ended(self._proxy)

    def fetching_failed(self, error: Exception) -> None:
        """Tell the one whose workers failed."""
        for observer in self.all:
            if observer.fetching is self._proxy._accel_fetching:
                observer.fetching_failed(error)


def _overriding(name: str, observers: tuple[LoopObserver, ...]) -> list[LoopObserver]:
    return [each for each in observers if getattr(type(each), name) is not getattr(LoopObserver, name)]


def observers_of(proxy: Any) -> tuple[LoopObserver, ...]:
    """Return those that hear what the loop does with `proxy`."""
    observers: tuple[LoopObserver, ...] = () if proxy._accel_listener is None else proxy._accel_listener.all
    return observers


def is_followed(proxy: Any, kind: type) -> bool:
    """Return whether an observer of a class hears what the loop does with `proxy`."""
    return any(isinstance(observer, kind) for observer in observers_of(proxy))


def follow(proxy: Any, observer: LoopObserver) -> None:
    """Let `observer` hear what the loop does with `proxy`, from its next epoch on at the latest."""
    if proxy._accel_listener is None:
        proxy._accel_listener = Observers(proxy)
    observers = proxy._accel_listener.all
    if not any(observer is known for known in observers):
        proxy._accel_listener.set((*observers, observer))


def leave(proxy: Any, observer: LoopObserver) -> None:
    """Let `observer` hear no more; a stand-in that nobody observes is the plain loader."""
    if proxy._accel_listener is None:
        return
    proxy._accel_listener.set(tuple(known for known in observers_of(proxy) if known is not observer))
    if not proxy._accel_listener.all:
        proxy._accel_listener = None
