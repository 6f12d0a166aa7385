"""The usual step time under a plan, and whether steps have become slower than it."""

from __future__ import annotations

import statistics
from collections import deque

_WINDOW = 3


class StepLevel:
    """Learn the usual step time from three medians, and report when three in a row are slower.

    Args:
        slower: how many times the usual step time is slower.
    """

    def __init__(self, slower: float) -> None:
        self._slower = slower
        self._medians_ms: deque[float] = deque(maxlen=_WINDOW)
        self._usual_ms: float | None = None

    @property
    def is_open(self) -> bool:
        """True if the usual step time is not known yet, or the last median was slow: measure again soon."""
        if self._usual_ms is None:
            return True
        return bool(self._medians_ms) and self._medians_ms[-1] > self._slower * self._usual_ms

    def add(self, median_ms: float) -> str:
        """Add a median; return how the step became slower, '' if it did not."""
        self._medians_ms.append(median_ms)
        if len(self._medians_ms) < _WINDOW:
            return ""
        if self._usual_ms is None:
            self._usual_ms = statistics.median(self._medians_ms)
            self._medians_ms.clear()
            return ""
        fastest_ms = min(self._medians_ms)
        if fastest_ms <= self._slower * self._usual_ms:
            return ""
        self._medians_ms.clear()
        return f"the step became slower ({self._usual_ms:.3g} → {fastest_ms:.3g} ms)"

    def forget(self) -> None:
        """Learn the usual step time again; the latest medians count towards it."""
        self._usual_ms = None

    def begin_anew(self) -> None:
        """Start over: what was measured ran under another plan."""
        self._usual_ms = None
        self._medians_ms.clear()
