"""Where a step's wall time goes: marks on the host clock that account for every nanosecond.

    request ── data ──▶ batch ── other ──▶ call ── forward ──▶ return ── backward ──▶ update ── optimizer ──▶ done
       ▲                                                                                                      │
       └─────────────────────────────────────────── other ────────────────────────────────────────────────────┘

Each mark books the time since the mark before it to one phase, so the phases add up to the step by construction.
`backward` is what lies between a forward call and the next mark, the loss included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

PHASES = ("data", "forward", "backward", "optimizer", "other")


@dataclass(slots=True, kw_only=True)
class Measurement:
    """One training step, from the request for its first batch to the next step's."""

    step: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    """Phase → seconds; the values add up to `seconds`."""
    samples: int = 0
    """Samples in all batches of the step; 0 when batches have no length."""
    batches: int = 1
    shape: Hashable = None
    """Signature of the step's first batch: shapes and dtypes of its tensors."""
    first: bool = False
    """True for the first step of an epoch, which holds the start of the loader."""


class StepClock:
    """Books host time to phases, mark by mark.

    Args:
        clock: returns seconds, monotonic; default `time.perf_counter`.

    Example:
        >>> clock = StepClock()
        >>> clock.request(); clock.batch(32, "shape"); clock.call(); clock.returned()
        >>> clock.update(); clock.updated(); measured = clock.close(step=0)
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.now = clock
        self._reset(clock())

    def _reset(self, now: float) -> None:
        self._opened = self._last = now
        self._after_forward = False
        self._booked = {"data": 0.0, "forward": 0.0, "backward": 0.0, "optimizer": 0.0, "other": 0.0}
        self._samples = self._batches = 0
        self._shape: Hashable = None
        self._first = False

    def _book(self, phase: str) -> None:
        now = self.now()
        self._booked[phase] += now - self._last
        self._last = now

    def _between(self) -> None:
        self._book("backward" if self._after_forward else "other")
        self._after_forward = False

    @property
    def last(self) -> float:
        """When the last mark was made, s."""
        return self._last

    def restart(self, *, first: bool = False) -> float:
        """Forget what was booked, begin a step now and return when that is; `first` marks the start of an epoch."""
        now = self.now()
        self._reset(now)
        self._first = first
        return now

    def request(self) -> None:
        """Mark that the loop asks the loader for a batch."""
        self._between()

    def batch(self, samples: int, shape: Hashable) -> None:
        """Mark that the batch has been handed over."""
        self._book("data")
        if self._batches == 0:
            self._shape = shape
        self._samples += samples
        self._batches += 1

    def call(self) -> None:
        """Mark that the model is called."""
        self._between()

    def returned(self) -> None:
        """Mark that the model's call has returned."""
        self._book("forward")
        self._after_forward = True

    def update(self) -> None:
        """Mark that an optimizer's step begins."""
        self._between()

    def updated(self) -> None:
        """Mark that an optimizer's step is done."""
        self._book("optimizer")
        self._after_forward = False

    def close(self, step: int) -> Measurement:
        """End the step at the mark just made and begin the next one there."""
        measured = Measurement(
            step=step,
            seconds=self._last - self._opened,
            phases=self._booked,
            samples=self._samples,
            batches=self._batches,
            shape=self._shape,
            first=self._first,
        )
        self._reset(self._last)
        return measured
