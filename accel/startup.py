"""What accel's own start takes of a run: its command line, its imports, `optimize` itself.

A run that ends after some seconds pays for these like for the search, so they are counted as its first cost. And the
run is older than its first step by then: so much of its time has passed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Iterator

_OLDEST_S = 10.0
"""How much of the time before the first step counts, s."""

_imported_at = time.perf_counter()
"""`accel` is imported first of all."""
_seconds = 0.0
_depth = 0
_has_aged = False


def is_off() -> bool:
    """Return whether the environment switches accel off: ACCEL is 0, off, false or no."""
    return os.environ.get("ACCEL", "").strip().lower() in ("0", "off", "false", "no")


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Count the seconds of a block, once where one is within another, and keep the garbage collector out of it.

    That looks through all that torch has made now and then. A script of 2.5 s has five such collections, with accel as
    without; one of 0.09 s often fell into accel's imports: it took more than they did, and was counted as theirs.
    """
    global _seconds, _depth
    began, was_on = time.perf_counter(), gc.isenabled()
    _depth += 1
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
        _depth -= 1
        if not _depth:
            _seconds += time.perf_counter() - began


def command_line_ends() -> None:
    """Count the seconds since `accel` was imported: they were its command's."""
    global _seconds, _imported_at
    now = time.perf_counter()
    _seconds += now - _imported_at
    _imported_at = now


def charge() -> float:
    """Return the seconds counted since the last call of this."""
    global _seconds
    seconds, _seconds = _seconds, 0.0
    return seconds


def ran_s() -> float:
    """Return how long this process has worked by now, 10 s at most, the first time this is called; 0 later.

    A later search in the same process begins with a run of its own. What counts is the calling thread's time on a
    processor: a notebook, or a worker of a pool, may have been idle for hours.
    """
    global _has_aged
    if _has_aged:
        return 0.0
    _has_aged = True
    return min(_OLDEST_S, time.thread_time())


def is_interactive() -> bool:
    """Return whether the interpreter goes on after what was interrupted: a statement typed, or a script with -i."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)
