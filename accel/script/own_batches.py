"""Loops that take their batches from no DataLoader: their steps end where the optimizer has stepped."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer

from accel.dataio.passes.proxy import LoaderProxy
from accel.run import ranks
from accel.session.events import StepEvents

_LOST = 50
"""After this many updates by others, the optimizer that began the turns is taken to be gone."""


class OwnBatches:
    """Stands for the batches that a loop makes itself; nobody iterates it."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


_Reference = Callable[[], Optimizer | None]


class UpdateBoundary:
    """End a step after the last update of each turn of the optimizers, of which none is kept alive.

    Attributes:
        proxy: what to pass to `accel.optimize` as the loader.
    """

    def __init__(self) -> None:
        self.proxy = LoaderProxy(OwnBatches())
        self._first: _Reference = lambda: None
        """The optimizer whose updates begin a turn."""
        self._last: _Reference = self._first
        self._latest: _Reference = self._first
        self._others = 0
        """Updates of others since its last one."""
        self._has_begun = False

    def join(self, events: StepEvents) -> None:
        """Begin the steps of a session that follows the proxy."""
        events.epoch_begins(self.proxy)
        events.batch_requested()
        events.batch_delivered(None, self.proxy)

    def updated(self, optimizer: Optimizer) -> None:
        """End the step if this optimizer is the one that stepped before the first one did so again."""
        first, this = self._first(), weakref.ref(optimizer)
        if optimizer is first:
            self._last, self._others = self._latest, 0
        elif self._is_gone(first) or self._others >= _LOST:
            self._first, self._last, self._has_begun = this, this, True
            self._others = 0
        else:
            self._others += 1
        self._latest = this
        if optimizer is self._last() and self.proxy._accel_listener is not None:
            self.proxy._accel_listener.batch_requested()
            self.proxy._accel_listener.batch_delivered(None)

    def _is_gone(self, first: Optimizer | None) -> bool:
        """Return whether another one may begin the turns at once.

        Not where ranks must pass the same boundaries: they may free an optimizer at different steps, as their garbage
        collectors have it.
        """
        return first is None and not (self._has_begun and ranks.are_several())
