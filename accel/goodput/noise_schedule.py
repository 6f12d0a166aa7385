"""Which steps are measured: the next one only when the last measurement has been paid for.

    steps to the next = cost / (overhead · step time - events)

A measurement's cost is what its step took more than the steps around it, and no less than the time spent in the
measuring code itself; the steps right after it, whose caches are cold, count too. The events of a step that is not
measured take their part of the share. So in the long run measuring takes the agreed share, however slow it is.

What a measurement takes beyond the usual, as with the first batch of a size on a GPU or in a stall of the machine, is
paid for little by little: waiting for all of it at once left a job with the noise scale of its beginning for 750 steps.

The first measurements come sooner, every other step and then ever more apart: an interval needs some before it says
anything, the noise scale grows fastest in the beginning, and a batch that is too small costs most while nothing is
known. What they took beyond the share is made up for by longer waits later.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

OVERHEAD = 0.015
"""Share of the time that is agreed by default: at 0.02 a loop of 10.9 ms took 3.1 % longer, 1.1 % of it unseen here."""
_FIRST_STEP = 8
"""Steps before the first measurement: the usual step time is unknown, and allocators and caches are cold."""
_RECENT = 15
"""Steps whose median is the usual step time."""
_MOST_STEPS = 10_000
_SOONER, _APART = 48, 1 / 16
"""Measurements at first, and the unmeasured steps between two of them, in those of the run so far."""
_AT_ONCE, _LOAN = 12, 60
"""The first of them are made at any cost, the others while measuring has taken less than so many steps too much."""
_LATEST, _MOST_TIMES = 5, 3
"""What is usual: at most so many times the median of the latest measurements."""
_REPAYING = 1 / 4
"""Of a usual measurement, what is paid back before the next one while there is a debt."""
_LARGE, _OF_LARGE = 64, 1 / 32
"""Of a debt beyond so many usual measurements, this part is paid back, up to the most that is usual."""
_SAVED = 12
"""Measurements that come at once, at most, after steps in which none could be made."""
_AFTERWARDS = 1.15
"""By what a measurement costs more, in the steps after it: of a step of 0.36 ms 68, 18, 8, 6 µs beside 1 ms."""
_EVENTS_S = 3e-6
"""What the events of a step take (measured in a loop, where they find cold caches; alone, a tenth of that)."""
_LEAST = 0.5
"""Of the share, what is left for measuring where steps are so short that their events take it."""


class NoiseSchedule:
    """Choose the steps to measure, so that measuring takes a share `overhead` of the run's time.

    Example:
        >>> schedule = NoiseSchedule(overhead=0.03)
        >>> for _ in range(8):
        ...     schedule.note_step(0.001)
        >>> schedule.is_due()
        True
        >>> for _ in range(48):  # the first ones come sooner
        ...     schedule.pay(0.0015, schedule.usual_s)
        >>> schedule.steps_left  # 64, and a quarter more to make up for them
        80
    """

    def __init__(self, overhead: float = OVERHEAD) -> None:
        self._overhead = overhead
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._costs: deque[float] = deque(maxlen=_LATEST)
        self._paid = self._steps = 0
        self._passed = 0
        """Steps since the last measurement."""
        self._debt_s = 0.0
        """What measuring has taken more than its share, as of then."""
        self.steps_left = _FIRST_STEP

    def is_due(self) -> bool:
        return self.steps_left <= 0

    @property
    def wants_time(self) -> bool:
        """False while the next measurement is so far away that the time of the coming step will not count."""
        return self.steps_left <= _RECENT

    def skip_step(self) -> None:
        self.steps_left -= 1
        self._passed += 1

    def note_step(self, seconds: float) -> None:
        self.skip_step()
        self._recent.append(seconds)

    @property
    def usual_s(self) -> float:
        """Median of the last unmeasured steps, s; 0 before the first."""
        return statistics.median(self._recent) if self._recent else 0.0

    def pay(self, cost_s: float, usual_s: float) -> None:
        """Wait for as many steps as pay for a measurement; arguments are the same on all ranks."""
        cost_s *= _AFTERWARDS
        self._costs.append(cost_s)
        self._paid += 1
        self._steps += self._passed + 1
        # By what the ranks have agreed on: by their own times they would measure at different steps.
        share_s = max(self._overhead * usual_s - _EVENTS_S, _LEAST * self._overhead * usual_s)
        self._debt_s = max(0.0, self._debt_s - share_s * self._passed) + cost_s
        self._passed = 0
        most_s = _MOST_TIMES * statistics.median_low(self._costs)
        usual_cost_s = min(cost_s, most_s)
        repaid_s = max(_REPAYING * usual_cost_s, min(_OF_LARGE * (self._debt_s - _LARGE * usual_cost_s), most_s))
        due_s = min(self._debt_s, usual_cost_s + repaid_s)
        apart = max(1, math.ceil(min(due_s / share_s, _MOST_STEPS))) if share_s > 0 else _MOST_STEPS
        if self._paid < _AT_ONCE or (self._paid < _SOONER and self._debt_s + usual_cost_s <= _LOAN * usual_s):
            apart = min(apart, max(1, round(self._steps * _APART)))
        # Steps in which none could be measured have paid for some that now follow each other.
        self.steps_left = max(1, apart + max(min(self.steps_left, 0), -_SAVED * apart))
