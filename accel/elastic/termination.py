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
    """Notes a signal in place of ending the process.

    The handler that was there is called, too, if it is a function; one that exits does so before anything is saved.
    Python allows handlers in the main thread only: elsewhere, nothing is installed. Processes forked
    meanwhile end by the signal, as they would without it.

    Args:
        number: of the signal; default SIGTERM.

    Attributes:
        requested: True once the signal has come.
        installed: whether signals come here.

    Example:
        >>> with Termination() as termination:
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     termination.requested
        True
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        self._number, self._closed, self._process = number, False, os.getpid()
        self._previous: Any = None
        self.requested = False
        self.installed = threading.current_thread() is threading.main_thread()
        if self.installed:
            self._previous = signal.signal(number, self._note)

    @property
    def is_survived(self) -> bool:
        """Whether the process goes on after the signal: it was ignored before, or is left to the script's handler."""
        earlier = getattr(self._previous, "__self__", None)
        if isinstance(earlier, Termination):  # of another training in this process
            return earlier.is_survived
        return self._previous == signal.SIG_IGN or (callable(self._previous) and not self._is_default())

    def close(self) -> None:
        """Put back the handler that was there, unless somebody has set another one since; that one may call ours."""
        self._closed = True
        # A bound method is made anew each time, so == and not `is`.
        in_main = threading.current_thread() is threading.main_thread()
        if self.installed and in_main and signal.getsignal(self._number) == self._note:
            signal.signal(self._number, signal.SIG_DFL if self._previous is None else self._previous)
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
                signal.signal(number, self._previous)
                os.kill(os.getpid(), number)
        elif callable(self._previous):
            self._previous(number, frame)

    def _is_default(self) -> bool:
        """Return whether the handler before ends the process, under accel's own commands by unwinding the script."""
        return self._previous == signal.SIG_DFL or isinstance(self._previous, UnwindOnTermination)
