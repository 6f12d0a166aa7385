"""SIGTERM as a flag: the signal that a scheduler sends some seconds before it kills a process.

The handler does nothing but note it. What it interrupts goes on, and the checkpoint is saved between two steps.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from accel.profiler.script import UnwindOnTermination


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
