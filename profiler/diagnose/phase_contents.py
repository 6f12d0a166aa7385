"""What a phase contains besides what it is named after: the making of batches, code in which no operator runs.

The clocks distinguish phases by what is called: the model, the backward pass, the update. A loop that makes its next
batch between the forward and the backward pass waits there, and the loss seems to take as long. Sampled lines and the
traced operators separate that from computation.
"""

from __future__ import annotations

import dataclasses
import re
import statistics

from accel.profiler.diagnose.anatomy import COMPUTING, Anatomy
from accel.profiler.diagnose.findings import tagged
from accel.profiler.evidence import Evidence

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
    whole = anatomy.each if phase == "outside" else anatomy.shares.get(phase, 0.0)
    return whole * tagged(evidence, [phase], "next batch")


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
