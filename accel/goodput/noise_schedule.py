"""Which steps are measured: the next one only when the last measurement has been paid for.

    steps to the next = cost / (overhead · step time)

A measurement's cost is what its step took more than the steps around it, and no less than the time spent in the
measuring code itself. So measuring takes the agreed share of the run, however slow it is.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from accel.errors import InvalidArgument

_FIRST_STEP = 8
"""Steps before the first measurement: the usual step time is unknown, and allocators and caches are cold."""
_RECENT = 15
"""Steps whose median is the usual step time."""
_MOST_STEPS = 10_000


class NoiseSchedule:
    """Choose the steps to measure.

    Args:
        overhead: share of the run's time that measuring may take, in (0, 1); default 0.03.

    Raises:
        InvalidArgument: if the share is out of range.

    Example:
        >>> schedule = NoiseSchedule(overhead=0.03)
        >>> for _ in range(8):
        ...     schedule.note_step(0.001)
        >>> schedule.is_due()
        True
        >>> schedule.pay(0.0015, schedule.usual_s)
        >>> schedule.steps_left
        50
    """

    def __init__(self, overhead: float = 0.03) -> None:
        if not 0 < overhead < 1:
            raise InvalidArgument(f"overhead must be a share between 0 and 1, such as 0.03. Found: {overhead}.")
        self._overhead = overhead
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self.steps_left = _FIRST_STEP
        """Unmeasured steps before the next measurement."""

    def is_due(self) -> bool:
        """Return whether the coming step is to be measured."""
        return self.steps_left <= 0

    def note_step(self, seconds: float) -> None:
        """Take an unmeasured step in."""
        self.steps_left -= 1
        self._recent.append(seconds)

    @property
    def usual_s(self) -> float:
        """Median of the last unmeasured steps, s; 0 before the first."""
        return statistics.median(self._recent) if self._recent else 0.0

    def pay(self, cost_s: float, usual_s: float) -> None:
        """Wait for as many steps as pay for a measurement.

        Args:
            cost_s: what it took.
            usual_s: an unmeasured step's time; the same on all ranks, as the cost.
        """
        steps = cost_s / (self._overhead * usual_s) if usual_s > 0 else _MOST_STEPS
        self.steps_left = max(1, min(math.ceil(steps), _MOST_STEPS)) if math.isfinite(steps) else _MOST_STEPS
