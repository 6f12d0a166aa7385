"""The times in which a loop does something else than steps: an evaluation, the end of an epoch, the end of it all."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident

import torch

from accel.profiler.loop.clock import StepClock
from accel.profiler.loop.delivery import MarkState


class Pauses:
    """Tells an experiment when the loop leaves its steps and when it goes on with them.

    Args:
        clock: what happens in these calls is taken off it.
        hot: `away` is set while the loop is elsewhere.
        guarded: calls a function whose error must not end the script.
        thread: the one that trains, by Python's id.
    """

    def __init__(
        self, clock: StepClock, hot: MarkState, guarded: Callable[[Callable[[], None]], None], thread: int
    ) -> None:
        self._clock, self._hot, self._guarded, self._thread = clock, hot, guarded, thread
        self._on_leave: Callable[[], None] | None = None
        self._on_return: Callable[[], None] = lambda: None

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
            self._off_the_clock(self._on_leave)

    def end(self) -> None:
        """The loop goes on with its steps."""
        if self._hot.away and torch.is_grad_enabled():
            self._hot.away = False
            self._off_the_clock(self._on_return)

    def _off_the_clock(self, call: Callable[[], None]) -> None:
        self._clock.enter(self._clock.code)
        self._guarded(call)
        self._clock.skip()
