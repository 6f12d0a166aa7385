"""The mean step and its parts, from the steps' phases."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from accel.profiler.phases import PHASES, Measurement

COMPUTING = ("forward", "loss", "backward")
_BETWEEN_UPDATES = ("evaluation", "outside")
_STARTING = 4
"""Steps that belong to the start of an epoch."""


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """Shares of the steps' wall time, 0…1."""

    steps: int
    step_s: float
    """Mean."""
    shares: dict[str, float]
    """Phase → share; they add up to 1."""
    epoch_start: float = 0.0
    """Of the data phase: how much longer the first steps of epochs waited than others."""
    epoch_slow: float = 0.0
    """Of the model's phases and the update: how much longer they take in these steps. Forking a process slows its
    parent down for a while: memory is shared copy-on-write, and each page is copied when it is next written."""
    each: float = 0.0
    """Of `outside`: what every step has."""
    stalls: float = 0.0
    """Of `outside` and `evaluation`: what only some steps have."""
    stall_every: float = 0.0
    """Mean number of steps from stall to stall, 0 if there are fewer than two."""
    batches: dict[str, float] = field(default_factory=dict)
    """Phase → the part of it in which the loop's own source makes the next batch."""
    own_code: dict[str, float] = field(default_factory=dict)
    """Phase of the model → the part of it in which surely no operator runs, batches left out."""
    own_unplaced: float = 0.0
    """Of the model's phases together: the same, where it can't be assigned to one of them."""

    @property
    def computing(self) -> float:
        """Forward pass, loss and backward pass, without batches and the loop's own code in them."""
        return max(0.0, sum(self.works(phase) for phase in COMPUTING) - self.own_unplaced)

    def works(self, phase: str) -> float:
        """Return the share of a phase without the making of batches and the loop's own code."""
        return max(0.0, self.shares.get(phase, 0.0) - self.batches.get(phase, 0.0) - self.own_code.get(phase, 0.0))


def of(steps: Sequence[Measurement]) -> Anatomy:
    """Return the anatomy of some steps; means, because a stall every twenty steps is time too."""
    total = sum(m.seconds for m in steps)
    if total <= 0:
        return Anatomy(steps=len(steps), step_s=0.0, shares=dict.fromkeys(PHASES, 0.0))
    shares = {phase: sum(m.phases.get(phase, 0.0) for m in steps) / total for phase in PHASES}
    waited = _waited_longer(steps)
    slow = _excess(steps, ("forward", "loss", "backward", "optimizer"))
    between = [sum(m.phases.get(phase, 0.0) for phase in _BETWEEN_UPDATES) for m in steps]
    usual = statistics.median(between)
    limit = usual + 0.5 * statistics.median(m.seconds for m in steps)
    stalled = [number for number, seconds in enumerate(between) if seconds > limit]
    stalls = sum(between[number] - usual for number in stalled)
    return Anatomy(
        steps=len(steps),
        step_s=total / len(steps),
        shares=shares,
        epoch_start=waited / total,
        epoch_slow=slow / total,
        each=max(0.0, (sum(between) - stalls) / total),
        stalls=stalls / total,
        stall_every=(stalled[-1] - stalled[0]) / (len(stalled) - 1) if len(stalled) > 1 else 0.0,
    )


def _starting(steps: Sequence[Measurement]) -> list[int]:
    """Return the indices of each epoch's first steps: one worker after the other delivers its first batch."""
    firsts = [n for n, m in enumerate(steps) if m.first]
    return sorted({n + k for n in firsts for k in range(_STARTING) if n + k < len(steps)})


def _waited_longer(steps: Sequence[Measurement]) -> float:
    """Return the seconds that the first steps of epochs waited longer than the others; 0 if there are no others."""
    waits = [m.phases.get("data", 0.0) for m in steps]
    ordinary = [wait for wait, m in zip(waits, steps, strict=True) if not m.first]
    if not ordinary:  # an epoch of one batch: its wait is the loader's own
        return 0.0
    usual = statistics.median(ordinary)
    return sum(max(0.0, waits[n] - usual) for n in _starting(steps))


def _excess(steps: Sequence[Measurement], phases: Sequence[str]) -> float:
    """Return the seconds that some phases take longer in the first steps of epochs than in the others."""
    starting = set(_starting(steps))
    spent = [sum(m.phases.get(phase, 0.0) for phase in phases) for m in steps]
    usual = statistics.median([s for n, s in enumerate(spent) if n not in starting] or [0.0])
    return sum(max(0.0, spent[n] - usual) for n in starting) if usual else 0.0


def typical(steps: Sequence[Measurement]) -> dict[str, float]:
    """Return the median seconds of each phase, scaled so that they add up to the median step."""
    if not steps:
        return {}
    medians = {phase: statistics.median(m.phases.get(phase, 0.0) for m in steps) for phase in PHASES}
    total = sum(medians.values())
    step = statistics.median(m.seconds for m in steps)
    return {phase: value * step / total for phase, value in medians.items()} if total > 0 else medians
