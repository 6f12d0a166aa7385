"""Steps by a GPU's clock: what the device took for each, however far the host ran ahead of it.

By the host's clock a block of steps from idle to idle begins with a fetch that nothing hides: 30 ms at steps of 60 ms
were 10 % of a block of five, of a faster plan's as of a slower one's, so that gains seemed smaller. Single steps were
what it takes to queue them. Events before and after each step, read once the device is idle, have neither fault.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

from accel.profiler.interruptions import ours

log = logging.getLogger("accel")


class DeviceClock:
    """Time steps by events; inert until a step is said to begin.

    Args:
        make: makes an event, with `record`, `query` and `elapsed_time`.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._open: list[Any] | None = None
        """Marks of the step under way: by turns it goes on and stands still."""
        self._ended: dict[int, list[Any]] = {}
        self._free: list[Any] = []
        self._later_s = 0.0
        """What the last step took after its last mark."""
        self._fails = False

    def begin(self) -> None:
        """Begin a step."""
        if not self._fails:
            self._free += self._open or []
            self._open = []
            self.mark()

    def begin_again(self) -> None:
        """Begin the step under way only now."""
        if self._open is not None:
            self.begin()

    def mark(self) -> None:
        """Leave out what the device does from here on; at the next mark, count it again."""
        if self._open is None:
            return
        try:
            event = self._free.pop() if self._free else self._make()
            event.record()
        except ours():  # the host's times are left, and the loop goes on
            self._fail()
        else:
            self._open.append(event)

    def end(self, number: int) -> None:
        """End the step under way.

        Args:
            number: of the step.
        """
        self.mark()
        if self._open is not None:
            self._ended[number], self._open = self._open, None
            self._later_s = 0.0

    def is_passed(self) -> bool:
        """Return whether the device has done the last step, as far as events on the current stream can tell."""
        last = next(reversed(self._ended.values()), None)
        try:
            return last is not None and bool(last[-1].query())
        except ours():
            self._fail()
            return False

    def went_on(self, seconds: float) -> None:
        """Note that the device was busy after the last step's last mark: the step's work is on another stream."""
        self._later_s = seconds

    def seconds(self) -> dict[int, float]:
        """Return what each step took that has ended since the last call, by number; the device must be idle."""
        try:
            took = {number: _took_s(marks) for number, marks in self._ended.items() if len(marks) % 2 == 0}
        except ours():
            self._fail()
            return {}
        if took:
            took[next(reversed(took))] += self._later_s
        self.forget()
        return took

    def forget(self) -> None:
        """Forget the steps that have ended."""
        self._free += itertools.chain.from_iterable(self._ended.values())
        self._ended.clear()

    def close(self) -> None:
        """Record no more, and let all events go."""
        self._fails, self._open = True, None
        self._ended.clear()
        self._free.clear()

    def _fail(self) -> None:
        self.close()
        log.debug("no events on the device", exc_info=True)


def _took_s(marks: list[Any]) -> float:
    took_ms: float = sum(start.elapsed_time(end) for start, end in zip(marks[::2], marks[1::2], strict=True))
    return took_ms / 1e3
