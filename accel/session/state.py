"""The mode of a run: its steps are measured, only counted, or ignored. And torch's modes, which are the loop's.

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
from collections.abc import Callable, Iterator
from enum import Enum

import torch

from accel.precision import outside_autocast as outside_autocast


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
        self.is_alone = True
        """No other rank takes the same steps: with several, all of them end a rest together."""
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
        """Let the next step of rest be the last one, on a rank that is alone: the controller has news."""
        if self.is_alone:
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


def keeping_grad_mode(act: Callable[[], None]) -> None:
    """Act, and leave the gradient mode as it was.

    Torch's `no_grad` sets it in one line of Python and restores it in another. Ctrl-C between the two would leave the
    loop that goes on without gradients. A call of C right at the beginning of `finally` can't be interrupted.
    """
    enabled = torch.is_grad_enabled()
    try:
        act()
    finally:
        torch._C._set_grad_enabled(enabled)
