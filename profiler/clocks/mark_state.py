"""The few values that the recorder's marks look at in every step."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class MarkState:
    """What the marked functions look at: slots, since the recorder has too many attributes to be fast."""

    __slots__ = (
        *("counting", "inside", "inside_backward", "iterator", "learning"),
        *("left", "optimizer", "stepped", "updating"),
    )

    def __init__(self) -> None:
        self.iterator: Any = None
        """The loop's iterator, unless its batches take the slow way."""
        self.stepped = self.updating = self.inside = self.inside_backward = False
        self.learning = True
        self.counting = True
        """The open step is looked at closely: its batches and its calls are counted."""
        self.optimizer: Optimizer | None = None
        """The one whose update ends a step that no loader ends: the first that stepped."""
        self.left = 1
        """Steps until the tape is handed over."""
