"""What a sample cache is doing, and what it has done."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class CacheMode(IntEnum):
    """What a cache does."""

    RESTING = 0
    """Nothing: each sample is fetched."""
    RECORDING = 1
    """Fetch each sample, and keep what comes out the same twice."""
    SERVING = 2
    """The same, but hand out what is kept."""


class CacheStats(NamedTuple):
    """What a cache has done so far; counts of several processes are close, not exact."""

    samples: int
    """In the dataset."""
    kept: int
    """Of these are kept now."""
    kept_bytes: int
    served: int
    """Handed out from memory."""
    fetched: int
    """Fetched from the dataset, checks included."""
    checked: int
    """Kept, and fetched all the same to be compared."""
    dropped: str
    """Why the cache has been given up; '' if it hasn't."""
