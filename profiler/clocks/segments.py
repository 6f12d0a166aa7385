"""Segments of the tape stored for later parsing: that costs 4 µs a step, and can wait until the loop is over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

KEPT_STEPS = 20_000
"""The last steps that are kept: 20 MB."""
MIN_STEPS, MAX_STEPS, SECONDS = 64, 512, 1.0
"""A segment has as many steps as take a second, within these bounds. With 64 always, handing segments over and the
readings that come with that cost 1 µs of a step of 70 µs."""


class Segments:
    """Keeps the last segments.

    Args:
        keep_steps: at least so many of the last steps are kept.
        now: the clock, s.

    Attributes:
        dropped: True once a segment was dropped at the front.
    """

    def __init__(self, keep_steps: int, now: Callable[[], float]) -> None:
        self.dropped = False
        self._keep_steps, self._now = keep_steps, now
        self._kept: deque[tuple[int, list[Any]]] = deque()
        self._steps, self._at = 0, 0.0

    def __iter__(self) -> Iterator[list[Any]]:
        return (tape for _, tape in self._kept)

    def append(self, steps: int, tape: list[Any]) -> None:
        """Store a tape with so many steps."""
        self._steps += steps
        self._kept.append((steps, tape))
        while self._steps - self._kept[0][0] >= self._keep_steps:
            self._steps -= self._kept.popleft()[0]
            self.dropped = True

    def next(self, steps: int) -> int:
        """Return how many steps the next segment should have; `steps` have been taken since the last call."""
        now = self._now()
        step_s = (now - self._at) / steps
        self._at = now
        return max(MIN_STEPS, min(MAX_STEPS, int(SECONDS / step_s) if step_s > 0 else MAX_STEPS))

    def clear(self) -> None:
        """Drop all segments."""
        self._kept.clear()
        self._steps = 0
