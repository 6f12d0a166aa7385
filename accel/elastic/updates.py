"""The updates of all optimizers of the process: how many there were, and who is told of each."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

from torch.optim.optimizer import register_optimizer_step_post_hook


class UpdateListener(Protocol):
    """Called after each update."""

    def updated(self) -> None:
        """An optimizer has stepped."""


class AllUpdates:
    """Count the steps of all optimizers, and tell listeners, which are not kept alive."""

    def __init__(self) -> None:
        self.count = 0
        self._listeners: tuple[weakref.ref[UpdateListener], ...] = ()  # a WeakSet takes 3 µs to be gone through
        register_optimizer_step_post_hook(self._stepped)

    def listen(self, one: UpdateListener) -> None:
        """Tell it of each update from now on."""
        self.forget(one)
        self._listeners = (*self._listeners, weakref.ref(one, self._drop))

    def forget(self, one: UpdateListener) -> None:
        """Tell it no more."""
        self._listeners = tuple(each for each in self._listeners if each() is not one)

    def _drop(self, reference: weakref.ref[UpdateListener]) -> None:
        self._listeners = tuple(each for each in self._listeners if each is not reference)

    def _stepped(self, *_: Any) -> None:
        self.count += 1
        for reference in self._listeners:
            if (one := reference()) is not None:
                one.updated()


@functools.cache
def all_updates() -> AllUpdates:
    """Return what counts them; from the first call on they are counted."""
    return AllUpdates()
