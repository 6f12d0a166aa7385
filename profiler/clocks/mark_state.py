"""The few values that the recorder's marks read in every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


class MarkState:
    """State of the marked functions; in slots, since reading attributes of the recorder, which has many, is slower."""

    __slots__ = (
        *("away", "counting", "in_backward", "in_call", "iterator", "learning"),
        *("steps_left", "optimizer", "stepped", "updating"),
    )

    def __init__(self) -> None:
        self.iterator: Any = None
        """The loop's iterator, unless its batches take the slow path."""
        self.stepped = self.updating = self.in_call = self.in_backward = False
        self.away = False
        """Whether an experiment was told that the loop does something else than steps."""
        self.learning = True
        self.counting = True
        """Whether the batches and calls of the open step are counted."""
        self.optimizer: Callable[[], Optimizer | None] = lambda: None
        """A weak reference to the optimizer whose update ends a step that no loader ends: the first that stepped."""
        self.steps_left = 1
        """Steps until the tape is handed over."""
