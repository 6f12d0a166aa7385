"""Where the loop's steps end, and how they are handed over: one by one, or in segments of the tape for later."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch.optim import Optimizer

from accel.profiler.interruptions import ours
from accel.profiler.loop.clock import CUT, RESUME, StepClock
from accel.profiler.loop.steps import EndingOptimizer
from accel.profiler.phases import Measurement

SEGMENT = 64
"""Steps between two readings that are not made at each step."""


class Delivery:
    """The steps on the tape of a clock, handed over as they end.

    Args:
        clock: its tape.
        thread: the one that trains, by Python's id.
        is_learning: returns whether updates still tell something about the loop.

    Attributes:
        on_step: called between two steps with the step just ended; its time belongs to no step.
        on_segment: called between two steps in place of `on_step` while `deferred` is set, every 64 steps.
        deferred: True leaves the tape unparsed until it is long, since parsing costs 4 µs a step; `catch_up` parses it.
            `on_step` is called for these steps then.
        steps: whole steps so far.
        step_s: seconds in steps, the first left out.
        failed: why recording has stopped, '' while it goes on.
        keep_steps: so many are left on the tape, and so many of the last ones are to be kept: 20 MB.
    """

    def __init__(self, clock: StepClock, thread: int, is_learning: Callable[[], bool]) -> None:
        self.clock, self.thread, self._is_learning = clock, thread, is_learning
        self.hot, self.ending = MarkState(), EndingOptimizer()
        self.pauses = Pauses(self)
        self.on_step: Callable[[Measurement], None] = lambda measured: None
        self.on_segment: Callable[[], None] = lambda: None
        self.deferred = False
        self.steps = 0
        self.step_s = 0.0
        self.failed = ""
        self.first_boundary = self.last_boundary = 0.0
        self.keep_steps = 20_000
        self._segment_steps = 1
        self._taped_steps = 0

    def boundary(self) -> None:
        """End the open step at the last mark, and begin the next one there."""
        hot = self.hot
        hot.stepped = False
        self.ending.others = 0
        hot.counting = not self.deferred
        self.clock.write(CUT)
        hot.steps_left -= 1
        if hot.steps_left <= 0:
            self.deliver()
        self.pauses.end()

    def deliver(self) -> None:
        """Hand over the steps since the last time."""
        self.guarded(self._hand_over)

    def guarded(self, work: Callable[[], None]) -> None:
        """Do something of the profiler's own; an error of it ends the recording, and not the script."""
        try:
            work()
        except ours() as error:
            # A later one follows from the first.
            self.failed = self.failed or f"the recorder stopped at step {self.steps}: {type(error).__name__}: {error}"
            self.hot.steps_left = sys.maxsize  # never again

    def _hand_over(self) -> None:
        hot = self.hot
        if self.deferred:
            self.steps += self._segment_steps
            self._taped_steps += self._segment_steps
            self.clock.reads_early = False
            if self._taped_steps >= self.keep_steps:
                self._parse()
            self.on_segment()
        else:
            for measured in self.clock.read():
                self.steps += 1
                self._record(measured)
        hot.steps_left = self._segment_steps = SEGMENT if self.deferred else 1
        hot.learning = self._is_learning()
        hot.counting = True
        hot.iterator = None  # the next batch takes the slow path, which counts it
        self.clock.write((RESUME, self.clock.now()))

    def _record(self, measured: Measurement) -> None:
        self.last_boundary = self.clock.reader.cut_at
        if measured.step == 0:
            self.first_boundary = self.last_boundary
        else:
            self.step_s += measured.seconds
        self.on_step(measured)

    def catch_up(self) -> None:
        """Parse the tape, and call `on_step` for its steps; an error loses those after it, no more."""
        self.guarded(self._parse)

    def _parse(self) -> None:
        self._taped_steps = 0
        for measured in self.clock.read():
            self._record(measured)

    def unattributed(self) -> float:
        """Return the share of the wall time, first boundary to last, that is in no step and not the profiler's own."""
        wall = self.last_boundary - self.first_boundary
        return max(0.0, 1.0 - (self.step_s + self.clock.reader.aside_s) / wall) if wall > 0 else 0.0


class Pauses:
    """Tells an experiment when the loop leaves its steps and when it goes on with them, off the clock of the steps.

    Attributes:
        is_between: no forward pass was under way when the pause began.
    """

    def __init__(self, delivery: Delivery) -> None:
        self._clock, self._hot, self._guarded = delivery.clock, delivery.hot, delivery.guarded
        self._thread = delivery.thread
        self._on_leave: Callable[[], None] | None = None
        self._on_return: Callable[[], None] = lambda: None
        self.is_between = True
        self._in_step = False
        """Whether the pause came between a batch and its update."""

    def watch(self, left: Callable[[], None], returned: Callable[[], None]) -> None:
        """Call back when a pause begins and when it ends, until `unwatch`."""
        self._on_leave, self._on_return = left, returned
        self._hot.away = False

    def unwatch(self) -> None:
        """Call back no more."""
        self._on_leave = None
        self._hot.away = False

    def begin(self) -> None:
        """The loop leaves its steps."""
        if self._on_leave is not None and not self._hot.away and get_ident() == self._thread:
            self._hot.away = True
            self._hot.iterator = None  # the next batch takes the slow path, which ends the pause
            self.is_between, self._in_step = self._place()
            self._off_the_clock(self._on_leave)

    def end(self) -> None:
        """The loop goes on with its steps."""
        if self._hot.away and torch.is_grad_enabled():
            self._hot.away = False
            self._off_the_clock(self._on_return)

    def end_in_step(self) -> None:
        """The model is called for training: what interrupted a step, between a batch and its update, is over."""
        if self._in_step:
            self.end()

    def _place(self) -> tuple[bool, bool]:
        """Return whether no forward pass is under way, and whether a batch has been asked for since the last update."""
        if self._hot.stepped:
            return True, False
        for entry in reversed(self._clock.tape):
            if entry.__class__ is str and entry in ("data", "outside"):
                return True, entry == "data"
            if entry.__class__ is str and entry in ("forward", "loss", "backward"):
                return False, True
        return self._clock.code in ("data", "outside"), True

    def _off_the_clock(self, call: Callable[[], None]) -> None:
        self._clock.enter(self._clock.code)
        self._guarded(call)
        self._clock.skip()


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
