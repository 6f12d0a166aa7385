"""Several optimizers of one step: which of their updates is the last one of a turn."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch.optim import Optimizer

from accel.run import ranks

_LOST = 50
"""After this many updates by others, the optimizer that began the turns is taken to be gone."""

_Reference = Callable[[], Optimizer | None]


class UpdateTurns:
    """Find the last update of each turn of the optimizers, of which none is kept alive."""

    def __init__(self) -> None:
        self._first: _Reference = lambda: None
        """The optimizer whose updates begin a turn."""
        self._last: _Reference = self._first
        self._latest: _Reference = self._first
        self._others = 0
        """Updates of others since its last one."""
        self._has_begun = False

    def ends_with(self, optimizer: Optimizer) -> bool:
        """Take in an update; return whether its optimizer stepped before the first one did so again."""
        first, this = self._first(), weakref.ref(optimizer)
        if optimizer is first:
            self._last, self._others = self._latest, 0
        elif self._is_gone(first) or self._others >= _LOST:
            self._first, self._last, self._has_begun = this, this, True
            self._others = 0
        else:
            self._others += 1
        self._latest = this
        return optimizer is self._last()

    def _is_gone(self, first: Optimizer | None) -> bool:
        """Return whether another one may begin the turns at once.

        Not where ranks must pass the same boundaries: they may free an optimizer at different steps, as their garbage
        collectors have it.
        """
        return first is None and not (self._has_begun and ranks.are_several())
