"""One process on a device at a time: a lock on a file, which says who holds it and since when.

Processes of a benchmark are started some at a time. Each imports and makes its data, which takes ten seconds, while
another is timed; then it waits here. The system gives the lock back when its holder ends, however it does.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Holder(NamedTuple):
    """Who has the device."""

    pid: int
    since: float
    """s since the epoch."""


@contextlib.contextmanager
def device_lock(path: Path | None) -> Iterator[None]:
    """Hold a file's lock in a block; None: there is nothing to wait for."""
    if path is None:
        yield
        return
    import fcntl  # not on Windows

    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            file.truncate(0)
            file.write(f"{os.getpid()} {time.time()}")
            file.flush()
            yield
        finally:
            file.truncate(0)
            # Also for workers of a loader, which have been forked with the open file, and may end later.
            fcntl.flock(file, fcntl.LOCK_UN)


def holder(path: Path) -> Holder | None:
    """Return who has written that it holds the lock; None if nobody has."""
    words = path.read_text(encoding="utf-8").split() if path.exists() else []
    return Holder(int(words[0]), float(words[1])) if len(words) == 2 else None
