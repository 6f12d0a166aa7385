"""What is done with the events of a run: its steps are measured, or only counted, or nothing is looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum


class Mode(Enum):
    """What is done with the events of a run."""

    MEASURING = "each step is timed"
    RESTING = "steps are counted, and nothing is timed; only the watch looks on"
    SUSPENDED = "nothing is looked at: the guard replays a call, or the user wants the plain loop"
    CLOSED = "everything has been taken back"


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
        """Count a step of rest, and tell whether it was the last one."""
        self._rest_left -= 1
        if self._rest_left == 0:
            self.mode = Mode.MEASURING
        return self._rest_left == 0

    def wake(self) -> None:
        """Let the next step of rest be the last one."""
        self._rest_left = min(self._rest_left, 1)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Look at nothing for a while."""
        before, self.mode = self.mode, Mode.SUSPENDED
        try:
            yield
        finally:
            if self.mode is Mode.SUSPENDED:  # it may have been closed meanwhile
                self.mode = before

    def close(self) -> None:
        """Look at nothing any more."""
        self.mode = Mode.CLOSED
