"""When to save a checkpoint: every so many seconds, at little cost, when asked, and before the process is killed.

With t seconds for one save and a share s of the time, the interval is max(interval, t / s). All ranks save after the
same step: they meet about once a second, where each says what it knows, and all decide alike from that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from accel.elastic.in_place import ResizeOrder
from accel.errors import InvalidArgument
from accel.profiler.script import UnwindOnTermination


class _RankReport(NamedTuple):
    since_save_s: float
    save_s: float
    asked: bool
    terminated: bool
    steps_to_next: int
    order: ResizeOrder


class SavePolicy:
    """Say after which steps to save.

        with SavePolicy(interval_s=600) as policy:
            for step, batch in enumerate(loader):
                ...
                if policy.due():
                    with policy.saving():
                        checkpoints.save(capture_state(model, optimizer, step=step))
                if policy.stop:
                    break

    Args:
        interval_s: seconds from one save to the next, at least; more than 0, default 600.
        share: of the time that saving may take, above 0, at most 1; default 0.01. What it took last lengthens the
            interval: 12 s are at most one in 20 minutes.
        sigterm: note SIGTERM, save after the step under way, then set `stop`; default True. See `Termination`.
        gather: with several ranks, gives each the values that all of them passed, by rank. Every rank then calls `due`
            after each of its steps, and `saving` where it is True.

    Attributes:
        stop: True on all ranks once one of them was sent SIGTERM, from the step on that is to be saved.
        look, order: returns the newest order to go on with other ranks, if set; and the one known when ranks met last.
        save_s: seconds that the last save took; 0.0 before the first.
        saved_s: seconds that all of them took.
        is_wanted: what is due was asked for, by a request or SIGTERM, and not by the interval; the same on all ranks.

    Raises:
        InvalidArgument: if a number is out of its range.

    Example:
        >>> policy = SavePolicy(60, sigterm=False)
        >>> policy.due()
        False
        >>> policy.request()
        >>> policy.due()
        True
    """

    _clock = staticmethod(time.monotonic)
    _meeting_s = 1.0
    """From one meeting of the ranks to the next, about: signals and requests wait so long."""

    def __init__(
        self,
        interval_s: float = 600.0,
        *,
        share: float = 0.01,
        sigterm: bool = True,
        gather: Callable[[Any], list[Any]] | None = None,
    ) -> None:
        for name, value, most in (("interval_s", interval_s, 1e12), ("share", share, 1)):
            if not 0 < value <= most:
                raise InvalidArgument(f"{name} must be more than 0 and at most {most:g}, got {value!r}")
        self._interval_s, self._share = interval_s, share
        self._gather = gather
        self.look: Callable[[], ResizeOrder] = ResizeOrder
        self.order = ResizeOrder()
        self._termination = Termination() if sigterm else None
        self._last_save = self._last_meeting = self._clock()
        self.save_s = self.saved_s = 0.0
        self._asked = self._answered = False
        self._steps = self._to_next = 0
        """Steps since the last meeting, and how many there are to be until the next."""
        self.stop = self.is_wanted = False

    def due(self) -> bool:
        """Return whether to save now; call it after each step.

        It is True again, at the next step or the next meeting of ranks, until `saving` was entered.
        """
        self._steps += 1
        if self._gather is None:
            return self._decide([self._report()])
        if self._steps < self._to_next:
            return False
        reports = [_RankReport(*report) for report in self._gather(tuple(self._report()))]
        self._steps, self._to_next, self._last_meeting = 0, reports[0].steps_to_next, self._clock()
        return self._decide(reports)

    @property
    def terminated(self) -> bool:
        """True once this process was sent SIGTERM, whether the other ranks know it or not."""
        return self._termination is not None and self._termination.requested

    def request(self) -> None:
        """Save after the next step; with several ranks one of them is enough, and it waits for their meeting."""
        self._asked = True

    @property
    def is_requested(self) -> bool:
        """Whether `request` was called since the last save."""
        return self._asked

    @contextlib.contextmanager
    def saving(self, keeps_request: bool = False) -> Iterator[None]:
        """Save inside of this: what it takes is measured, and the interval begins anew, whether it succeeds or not.

        Args:
            keeps_request: what was requested is to be saved later all the same; default False.
        """
        begin = self._clock()
        try:
            yield
        finally:
            self._last_save = self._clock()
            self.save_s = self._last_save - begin
            self.saved_s += self.save_s
            self._asked = self._asked and keeps_request
            self._answered = self.stop

    @property
    def is_survived(self) -> bool:
        """Whether this process goes on after SIGTERM, since it is ignored or the script has a handler of its own."""
        return self._termination is not None and self._termination.is_survived

    def go_on(self) -> None:
        """Be ready for the next SIGTERM: this one has been answered by a save."""
        self.stop = self._answered = False
        if self._termination is not None:
            self._termination.requested = False

    def close(self) -> None:
        """Put back the handler of SIGTERM that was there."""
        if self._termination is not None:
            self._termination.close()

    def __enter__(self) -> SavePolicy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _report(self) -> _RankReport:
        now = self._clock()
        step_s = max(now - self._last_meeting, 1e-9) / max(self._steps, 1)
        # At most twice as many as before: steps that were quick at first are no measure.
        to_next = max(1, min(int(self._meeting_s / step_s), 2 * max(self._steps, 1)))
        return _RankReport(now - self._last_save, self.save_s, self._asked, self.terminated, to_next, self.look())

    def _decide(self, reports: list[_RankReport]) -> bool:
        """Return whether to save: the same on all ranks, since the reports are."""
        self.order = ResizeOrder(*reports[0].order)
        self.stop = self.stop or any(report.terminated for report in reports)
        self.is_wanted = (self.stop and not self._answered) or any(report.asked for report in reports)
        if self.is_wanted:
            return True
        # The clock of rank 0 counts, and the slowest save: the others wait for it.
        longest = max(report.save_s for report in reports)
        return reports[0].since_save_s >= max(self._interval_s, longest / self._share)


class Termination:
    """Notes SIGTERM in place of ending the process.

    The handler that was there is called, too, if it is a function; one that exits does so before anything is saved.
    Python allows handlers in the main thread only: elsewhere, nothing is installed. Processes forked
    meanwhile end by the signal, as they would without it.

    Attributes:
        requested: True once the signal has come.
        installed: whether signals come here.

    Example:
        >>> with Termination() as termination:
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     termination.requested
        True
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._previous: Any = None
        self.requested = self.installed = self._closed = False
        if threading.current_thread() is threading.main_thread():
            self._previous, self.installed = signal.signal(signal.SIGTERM, self._note), True

    @property
    def is_survived(self) -> bool:
        """Whether the process goes on after the signal: it was ignored before, or is left to the script's handler."""
        earlier = self._earlier
        if (other := _owner(earlier)) is not None:
            return other.is_survived
        return earlier == signal.SIG_IGN or (callable(earlier) and not self._is_default())

    def close(self) -> None:
        """Put back the handler that was there, unless somebody has set another one since; that one may call ours."""
        self._closed = True
        # A bound method is made anew each time, so == and not `is`.
        in_main = threading.current_thread() is threading.main_thread()
        if self.installed and in_main and signal.getsignal(signal.SIGTERM) == self._note:
            earlier = self._earlier
            signal.signal(signal.SIGTERM, signal.SIG_DFL if earlier is None else earlier)
            self.installed = False

    def __enter__(self) -> Termination:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if self._is_default():
            # Nobody looks at the flag in a forked process, which terminate() is to end, or under a handler that was set
            # over this one and calls it.
            if self._closed or os.getpid() != self._process:
                signal.signal(number, self._earlier)
                os.kill(os.getpid(), number)
        elif callable(earlier := self._earlier):
            earlier(number, frame)

    @property
    def _earlier(self) -> Any:
        """The handler that was there; where that is one of these and closed since, what was there before it."""
        earlier = self._previous
        while (other := _owner(earlier)) is not None and other._closed:
            earlier = other._previous
        return earlier

    def _is_default(self) -> bool:
        """Return whether the handler before ends the process, under accel's own commands by unwinding the script."""
        return self._earlier == signal.SIG_DFL or isinstance(self._earlier, UnwindOnTermination)


def _owner(handler: Any) -> Termination | None:
    """Return whose handler it is, of another training in this process; None for any other."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, Termination) else None
