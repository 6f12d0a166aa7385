"""Loops that take their batches from no DataLoader: their steps end where the optimizer has stepped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from accel.dataio.passes.proxy import LoaderProxy
from accel.session.events import StepEvents
from accel.session.update_turns import UpdateTurns


class OwnBatches:
    """Stands for the batches that a loop makes itself; nobody iterates it."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class UpdateBoundary:
    """End a step after the last update of each turn of the optimizers.

    Attributes:
        proxy: what to pass to `accel.optimize` as the loader.
    """

    def __init__(self) -> None:
        self.proxy = LoaderProxy(OwnBatches())
        self._turns = UpdateTurns()

    def join(self, events: StepEvents) -> None:
        """Begin the steps of a session that follows the proxy."""
        events.epoch_begins(self.proxy)
        events.batch_requested()
        events.batch_delivered(None, self.proxy)

    def updated(self, optimizer: Optimizer) -> None:
        """End the step if this optimizer is the one that stepped before the first one did so again."""
        if self._turns.ends_with(optimizer) and self.proxy._accel_listener is not None:
            self.proxy._accel_listener.batch_requested()
            self.proxy._accel_listener.batch_delivered(None)
