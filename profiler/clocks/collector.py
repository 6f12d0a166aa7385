"""How long the garbage collector runs, measured by a callback that has no Python frame.

A signal that arrives while the collector runs is handled at the next instruction of Python code. In a callback written
in Python that instruction is the callback's own, and what the handler raises there (Ctrl-C, an alarm) is printed as
"Exception ignored" and lost. So the callback here consists of C functions: it asks an object for its attribute `start`
or `stop`, whose value is computed by advancing an iterator, which adds the clock to a sum.
"""

from __future__ import annotations

import functools
import gc
import itertools
import time
from collections import deque
from typing import Any


class _Moments:
    """The sum of the times at which `mark` was called, in ns since the clock's zero; integers, so it is exact."""

    def __init__(self) -> None:
        self._last = deque([0], maxlen=1)
        moments = iter(time.perf_counter_ns, None)
        self._marks = map(self._last.append, itertools.accumulate(moments))
        self.mark = functools.partial(next, self._marks)

    @property
    def total(self) -> int:
        return self._last[-1]


class Collector:
    """Add up the garbage collector's time."""

    def __init__(self) -> None:
        self._begun, self._ended = _Moments(), _Moments()
        # `next` gets the object as its second argument, which it only returns when an iterator is exhausted.
        marks = {"start": property(self._begun.mark), "stop": property(self._ended.mark)}
        self._callback: Any = functools.partial(getattr, type("Phases", (), marks)())
        self._seconds = 0.0

    def install(self) -> None:
        """Start counting."""
        gc.callbacks.append(self._callback)

    def remove(self) -> None:
        """Stop counting."""
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)

    @property
    def seconds(self) -> float:
        """Seconds it has run so far; a collection in progress in another thread counts once it is over."""
        # While a collection is in progress its start time alone makes the difference negative.
        self._seconds = max(self._seconds, (self._ended.total - self._begun.total) / 1e9)
        return self._seconds
