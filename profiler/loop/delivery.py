"""Hands over the steps that have ended: one by one, or in segments of the tape that are parsed later."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer

from accel.profiler.interruptions import ours
from accel.profiler.loop.clock import StepClock
from accel.profiler.phases import Measurement


class Delivery:
    """The steps on the tape of a clock, handed over as they end.

    Args:
        clock: its tape.

    Attributes:
        on_step: called between two steps with the step just ended; its time belongs to no step.
        on_segment: called between two steps in place of `on_step` while `deferred` is set, every 64 to 512 steps.
        deferred: True stores the tape unparsed, since parsing costs 4 µs a step; `catch_up` parses it and calls
            `on_step` for these steps.
        steps: whole steps so far.
        step_s: seconds in steps, the first left out.
        failed: why recording has stopped, '' while it goes on.
    """

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self.on_step: Callable[[Measurement], None] = lambda measured: None
        self.on_segment: Callable[[], None] = lambda: None
        self.deferred = False
        self.steps = 0
        self.step_s = 0.0
        self.failed = ""
        self.first_boundary = self.last_boundary = 0.0
        self._hot = MarkState()
        self._segments = Segments(KEPT_STEPS, clock.now)
        self._segment_steps = 1

    def _is_learning(self) -> bool:
        """Return whether updates still tell something about the loop."""
        raise NotImplementedError

    def _deliver(self) -> None:
        """Hand over the steps since the last time; an error of the profiler's own must not end the script."""
        self._guarded(self._hand_over)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except ours() as error:
            self.failed = f"the recorder stopped at step {self.steps}: {type(error).__name__}: {error}"
            self._hot.steps_left = sys.maxsize  # never again

    def _hand_over(self) -> None:
        hot = self._hot
        if self.deferred:
            self.steps += self._segment_steps
            self._segments.append(self._segment_steps, self.clock.detach())
            self.on_segment()
        else:
            for measured in self.clock.read():
                self.steps += 1
                self._record(measured)
        hot.steps_left = self._segment_steps = self._segments.next(self._segment_steps) if self.deferred else 1
        hot.learning = self._is_learning()
        hot.counting = True
        hot.iterator = None  # the next batch takes the slow path, which counts it
        self.clock.resume()

    def _record(self, measured: Measurement) -> None:
        self.last_boundary = self.clock.cut_at
        if measured.step == 0:
            self.first_boundary = self.last_boundary
        else:
            self.step_s += measured.seconds
        self.on_step(measured)

    def catch_up(self) -> None:
        """Parse the stored segments, call `on_step` for their steps; an error loses those after it, no more."""
        self._guarded(self._parse_stored)

    def _parse_stored(self) -> None:
        for number, segment in enumerate(self._segments):
            if number == 0 and self._segments.dropped:  # the steps before were dropped
                self.first_boundary, self.step_s, self.clock.aside_s = segment[1], 0.0, 0.0
            for measured in self.clock.read(segment):
                self._record(measured)
        self._segments.clear()
        for measured in self.clock.read():
            self._record(measured)

    def unattributed(self) -> float:
        """Return the share of the wall time, first boundary to last, that is in no step and not the profiler's own."""
        wall = self.last_boundary - self.first_boundary
        return max(0.0, 1.0 - (self.step_s + self.clock.aside_s) / wall) if wall > 0 else 0.0


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
