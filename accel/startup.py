"""What accel's own start takes of a run: its command line, its imports, `optimize` itself.

A run that ends after some seconds pays for these like for the search, so they are counted as its first cost.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

_imported_at = time.perf_counter()
"""`accel` is imported first of all."""
_seconds = 0.0
_depth = 0


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Count the seconds of a block, once where one is within another."""
    global _seconds, _depth
    began = time.perf_counter()
    _depth += 1
    try:
        yield
    finally:
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
