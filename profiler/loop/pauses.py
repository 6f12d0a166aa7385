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
        self._on_leave: Callable[[bool], None] | None = None
        self._on_return: Callable[[], None] = lambda: None
        self._on_call: Callable[[], None] = lambda: None
        self._in_step = False
        """Whether the pause came between a batch and its update."""

    def watch(
        self,
        left: Callable[[bool], None],
        returned: Callable[[], None],
        called: Callable[[], None] = lambda: None,
    ) -> None:
        """Call back at each pause until `unwatch`.

        Args:
            left: called when it begins, with whether no step is under way.
            returned: called when it ends.
            called: called by `called`.
        """
        self._on_leave, self._on_return, self._on_call = left, returned, called
        self._hot.away = False

    def unwatch(self) -> None:
        """Call back no more."""
        self._on_leave = None
        self._hot.away = False

    def called(self) -> None:
        """The model is called for training, whether or not a step comes of it."""
        if self._on_leave is not None:
            self._guarded(self._on_call)

    def begin(self) -> None:
        """The loop leaves its steps."""
        left = self._on_leave
        if left is None or self._hot.away or get_ident() != self._thread:
            return
        self._hot.away = True
        self._hot.iterator = None  # the next batch takes the slow path, which ends the pause
        is_between, self._in_step = self._place()
        self._off_the_clock(lambda: left(is_between))

    def end(self) -> None:
        """The loop goes on with its steps."""
        if self._hot.away and torch.is_grad_enabled():
            self._hot.away = False
            self._off_the_clock(self._on_return)

    def end_in_step(self) -> None:
        """The model is called for training: what interrupted a step, between a batch and its update, is over."""
        if self._in_step:
            self.end()

    def _off_the_clock(self, call: Callable[[], None]) -> None:
        clock = self._clock
        clock.enter(clock.code)
        self._guarded(call)
        clock.skip()

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
