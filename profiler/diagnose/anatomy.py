"""The mean step and its parts, from the steps' phases, the sampled lines and the traced operators.

The clocks distinguish phases by what is called: the model, the backward pass, the update. A loop
that makes its next batch between the forward and the backward pass waits there, and the loss seems
to take as long. Sampled lines and the traced operators separate that from computation.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from accel.profiler.diagnose.findings import tagged
from accel.profiler.evidence import Evidence
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


OVERHEAD = 3.0
"""The model's phases may take this many times the operators' own traced time because of Python and autograd around
each operator. A loop of 1,554 small operations took 0.9 times as long, since tracing them takes time too."""
_MUCH = 0.3
"""Share of the step from which time without operators counts: two traced steps resolve no less."""

_NEXT = re.compile(r"\bnext\(")
_BACKWARD = re.compile(r"\bbackward\(")


def with_parts(anatomy: Anatomy, evidence: Evidence) -> Anatomy:
    """Return the anatomy with `batches` and the loop's own code filled in."""
    batches = {phase: share for phase in _holds_batches(evidence) if (share := _batches(anatomy, evidence, phase)) > 0}
    anatomy = dataclasses.replace(anatomy, batches=batches)
    own, operators = _own_code(anatomy, evidence)
    candidates = {phase: _placed(anatomy, evidence, phase, operators) for phase in COMPUTING} if own else {}
    placed = {phase: share for phase, share in candidates.items() if share > 0}
    return dataclasses.replace(anatomy, own_code=placed, own_unplaced=0.0 if placed else own)


def _placed(anatomy: Anatomy, evidence: Evidence, phase: str, operators: float) -> float:
    """Return how much of the loop's own code a phase surely holds.

    It is at least what is left of the phase if all operators ran in it; the trace doesn't show which phase they ran in.
    """
    works = anatomy.works(phase)
    if works <= OVERHEAD * operators:
        return 0.0
    rows = [row for row in evidence.lines if row.phase == phase]
    # Python code that the engine calls has lines of its own; at the call itself the engine computes, or waits.
    engine = sum(row.seconds for row in rows if phase == "backward" and _BACKWARD.search(row.source))
    own = 1.0 - engine / sum(row.seconds for row in rows) if engine else 1.0
    return min(works - operators, works * own)


def _holds_batches(evidence: Evidence) -> tuple[str, ...]:
    """Return the phases in which lines that seem to make batches can be trusted to do so."""
    before = () if evidence.model_called else ("forward",)
    if evidence.loader.kind != "DataLoader":
        return ("outside", "host", "loss", *before)
    # What is done to a loader's batches before the model is called is the loop's own code, and reported as such. After
    # the call, only an explicit `next(` shows that there is a second source of batches.
    asks = any(row.phase == "loss" and "next batch" in row.tags and _NEXT.search(row.source) for row in evidence.lines)
    return ("loss", *before) if asks else before


def _batches(anatomy: Anatomy, evidence: Evidence, phase: str) -> float:
    share = anatomy.shares.get(phase, 0.0)
    return min(share, (anatomy.each if phase == "outside" else share) * tagged(evidence, [phase], "next batch"))


def _own_code(anatomy: Anatomy, evidence: Evidence) -> tuple[float, float]:
    """Return the shares of the step in the model's phases in which no operator runs, and in which one does."""
    trace = evidence.trace
    # Waiting for other ranks is no operator either, nor are the stacks that anomaly detection records.
    elsewhere = evidence.world_size > 1 or evidence.anomaly_mode
    if trace is None or trace.operators_ms is None or elsewhere or anatomy.step_s <= 0:
        return 0.0, 0.0
    # Medians, because the traced steps are usual ones: a mean includes compilations and stalls.
    usual_s = statistics.median(sum(m.phases.get(phase, 0.0) for phase in COMPUTING) for m in evidence.steps)
    step_s = statistics.median(m.seconds for m in evidence.steps)
    booked = sum(anatomy.shares.get(phase, 0.0) for phase in COMPUTING)
    computing_s, operators_s = usual_s * anatomy.computing / booked if booked else 0.0, trace.operators_ms / 1e3
    if computing_s - OVERHEAD * operators_s < _MUCH * step_s:
        return 0.0, 0.0
    operators = anatomy.computing * operators_s / computing_s
    return anatomy.computing - operators, operators
