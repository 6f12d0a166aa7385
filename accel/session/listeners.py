"""All sessions that follow one loader: a GAN's two models, say, whose batches come from the same place."""

from __future__ import annotations

from typing import Any, Protocol

from accel.dataio.passes.proxy import Fetching, LoaderProxy


class Follower(Protocol):
    """What follows a loader: a session."""

    @property
    def fetching(self) -> Fetching:
        """The fetching that it may change."""

    def epoch_begins(self, proxy: LoaderProxy) -> None:
        """The loop has asked for an iterator."""

    def batch_requested(self) -> None:
        """The loop asks for a batch."""

    def batch_delivered(self, batch: Any, proxy: LoaderProxy) -> None:
        """A batch of this loader is about to be handed over."""

    def epoch_ended(self, proxy: LoaderProxy) -> None:
        """The loader has no more batches in this epoch."""

    def fetching_failed(self, error: Exception) -> None:
        """The follower's own way of fetching failed."""


class Onlooker:
    """Hears what the loop does with a loader and leaves its fetching alone; subclasses say what they act on."""

    def __init__(self) -> None:
        self.fetching = Fetching()  # of its own, without effect

    def epoch_begins(self, proxy: LoaderProxy) -> None:
        """The loop has asked for an iterator."""

    def batch_requested(self) -> None:
        """The loop asks for a batch."""

    def batch_delivered(self, batch: Any, proxy: LoaderProxy) -> None:
        """A batch of this loader is about to be handed over."""

    def epoch_ended(self, proxy: LoaderProxy) -> None:
        """The loader has no more batches in this epoch."""

    def fetching_failed(self, error: Exception) -> None:
        """Never called: its own fetching is not in use."""


class Listeners:
    """Tell each follower what the loop does with one loader, in the order in which they came.

    Args:
        proxy: the loader's stand-in.
    """

    def __init__(self, proxy: LoaderProxy) -> None:
        self._proxy = proxy
        self._set(())

    def _set(self, followers: tuple[Follower, ...]) -> None:
        # Others with each change, so that a loop over them may change them. Of a batch only those hear who act on it.
        requested = tuple(each.batch_requested for each in followers)
        act = [each for each in followers if type(each).batch_delivered is not Onlooker.batch_delivered]
        delivered = tuple(each.batch_delivered for each in act)
        self._followers, self._requested, self._delivered = followers, requested, delivered  # Ctrl-C: all or none

    def epoch_begins(self) -> None:
        """The loop has asked for an iterator."""
        for follower in self._followers:
            follower.epoch_begins(self._proxy)

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
        for follower in self._followers:
            follower.epoch_ended(self._proxy)

    def fetching_failed(self, error: Exception) -> None:
        """Tell the one whose workers failed."""
        for follower in self._followers:
            if follower.fetching is self._proxy._accel_fetching:
                follower.fetching_failed(error)


def follow(proxy: LoaderProxy, follower: Follower) -> None:
    """Let `follower` hear of what the loop does with `proxy`, from its next epoch on at the latest."""
    if proxy._accel_listener is None:
        proxy._accel_listener = Listeners(proxy)
    followers = proxy._accel_listener._followers
    if not any(follower is known for known in followers):
        proxy._accel_listener._set((*followers, follower))


def leave(proxy: LoaderProxy, follower: Follower) -> None:
    """Let `follower` hear no more; a stand-in that nobody follows is the plain loader."""
    if proxy._accel_listener is None:
        return
    listeners = proxy._accel_listener
    listeners._set(tuple(known for known in listeners._followers if known is not follower))
    if not listeners._followers:
        proxy._accel_listener = None


def is_followed(proxy: LoaderProxy, kind: type) -> bool:
    """Return whether a follower of a class hears of what the loop does with `proxy`."""
    followers = () if proxy._accel_listener is None else proxy._accel_listener._followers
    return any(isinstance(follower, kind) for follower in followers)


def free_fetching(proxy: LoaderProxy) -> Fetching:
    """Return the fetching of `proxy` if nobody changes it yet, else one of its own that has no effect."""
    followers = () if proxy._accel_listener is None else proxy._accel_listener._followers
    taken = any(follower.fetching is proxy._accel_fetching for follower in followers)
    return Fetching() if taken else proxy._accel_fetching
