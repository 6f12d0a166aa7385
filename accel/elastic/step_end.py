"""When a step of the loop has ended: before what follows the loader does anything of its own."""

from __future__ import annotations

from collections.abc import Callable

from accel.profiler.loop.observers import LoopObserver


class StepEnd(LoopObserver):
    """Stops the clock of a step before anything else hears that it has ended.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.at = 0.0
        self._clock = clock

    def batch_requested(self) -> None:
        """Note the time."""
        self.at = self._clock()
