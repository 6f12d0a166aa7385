"""What a GPU still has to do at the ends of a stretch of steps: the host's time for them leaves it out or has too much.

A host that runs ahead fills its queue: by its clock four steps take as long as it takes to launch them. Waiting for the
device before and after them is no remedy: the first step from an idle device waits for a loader that is hidden in all
others (8 of 12 ms made four steps of 48 ms 56). So the stretch begins with a queue, and how much there was is told by
events: one when the device was idle, which both clocks see at once, and one at the beginning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Backlog:
    """Corrects the host's time for a stretch of steps.

    Args:
        now: the host's clock, s.
        synchronize: waits until the device has done its work.
        make: makes an event with `record` and `elapsed_time`.
    """

    def __init__(self, now: Callable[[], float], synchronize: Callable[[], Any], make: Callable[[], Any]) -> None:
        self._now, self._synchronize = now, synchronize
        self._idle, self._start = make(), make()
        self._idle_at = self._start_at = 0.0

    def drain(self) -> None:
        """Wait for the device; a step or more should follow before the stretch begins."""
        self._synchronize()
        self._idle.record()
        self._idle_at = self._now()

    def begin(self) -> None:
        """Begin the stretch."""
        self._start.record()
        self._start_at = self._now()

    def end(self) -> float:
        """End it: wait for the device, and return how much longer than the host it took for the stretch, s."""
        ended_at = self._now()
        self._synchronize()
        before_s: float = self._idle_at + self._idle.elapsed_time(self._start) / 1e3 - self._start_at
        after_s = self._now() - ended_at
        return after_s - max(0.0, before_s)
