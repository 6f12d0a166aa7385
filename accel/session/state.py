"""The mode of a run: its steps are measured, only counted, or ignored.

    MEASURING ──── rest(n), as an action begins ────▶ RESTING
        ▲  │  ◀─── n steps later, or `wake()` ───────    │
        │  └──────────────┬──────────────────────────────┘
        │ the block ends  ▼ `suspended()`: replays of the guard, `accel.disabled()`
        └──────────── SUSPENDED

    CLOSED from anywhere, and for good: `accel.undo`, a failure of accel's own, another rank that has stopped

An action of the search is such a sequence: its rest, then its settling steps and its counted ones, which are MEASURING.
At the boundary after the last of them the session sends the result, and the next action begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum


class Mode(Enum):
    """How the events of a run are handled."""

    MEASURING = "each step is timed"
    RESTING = "steps are counted but not timed; only the watch is active"
    SUSPENDED = "events are ignored: the guard replays a call, or the user has asked for the plain loop"
    CLOSED = "everything has been undone"


class RunState:
    """The mode of a run, and how long it rests."""

    def __init__(self) -> None:
        self.mode = Mode.MEASURING
        self._rest_left = 0

    def rest(self, steps: int) -> None:
        """Measure nothing in the next `steps` steps."""
        self._rest_left = steps
        self.mode = Mode.RESTING if steps else Mode.MEASURING

    def rested(self) -> bool:
        """Count a step of rest; return whether it was the last one."""
        self._rest_left -= 1
        if self._rest_left == 0:
            self.mode = Mode.MEASURING
        return self._rest_left == 0

    def wake(self) -> None:
        """Let the next step of rest be the last one."""
        self._rest_left = min(self._rest_left, 1)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Ignore events inside the block."""
        before, self.mode = self.mode, Mode.SUSPENDED
        try:
            yield
        finally:
            if self.mode is Mode.SUSPENDED:  # it may have been closed inside the block
                self.mode = before

    def close(self) -> None:
        """Ignore events from now on."""
        self.mode = Mode.CLOSED
