"""What a phase holds beside what it is named after: batches that the loop makes there, code in which no operator runs.

The clocks tell phases apart by what is called: the model, the backward pass, the update. A loop that makes its next
batch between the forward and the backward pass waits there, and the loss seems to take as long. Sampled lines and the
traced operators tell that from computing.
"""

from __future__ import annotations

import dataclasses
import re
import statistics

from accel.profiler.diagnose.anatomy import COMPUTING, Anatomy
from accel.profiler.diagnose.findings import tagged
from accel.profiler.evidence import Evidence

OVERHEAD = 3.0
"""Times the operators' own time, as traced, that the model's phases may take because of them: Python and autograd
around each. A loop of 1,554 small operations took 0.9 times as long, since tracing them takes time too."""
_MUCH = 0.3
"""Share of the step from which on time without operators counts: two traced steps tell no less."""

_NEXT = re.compile(r"\bnext\(")
_BACKWARD = re.compile(r"\bbackward\(")


def look(found: Anatomy, evidence: Evidence) -> Anatomy:
    """Return the anatomy with the phases' parts."""
    batches = {phase: share for phase in _holds_batches(evidence) if (share := _batches(found, evidence, phase)) > 0}
    found = dataclasses.replace(found, batches=batches)
    own, operators = _own_code(found, evidence)
    placed = {phase: share for phase in COMPUTING if own and (share := _placed(found, evidence, phase, operators)) > 0}
    return dataclasses.replace(found, own_code=placed, own_unplaced=0.0 if placed else own)


def _placed(found: Anatomy, evidence: Evidence, phase: str, operators: float) -> float:
    """Return how much of the loop's own code a phase surely holds.

    It is at least what is left of the phase if all operators ran in it; the trace doesn't tell in which they did.
    """
    works = found.works(phase)
    if works <= OVERHEAD * operators:
        return 0.0
    rows = [row for row in evidence.lines if row.phase == phase]
    # Python code that the engine calls has lines of its own; at the call itself the engine computes, or waits.
    engine = sum(row.seconds for row in rows if phase == "backward" and _BACKWARD.search(row.source))
    own = 1.0 - engine / sum(row.seconds for row in rows) if engine else 1.0
    return min(works - operators, works * own)


def _holds_batches(evidence: Evidence) -> tuple[str, ...]:
    """Return the phases in which lines that make batches are what they seem."""
    before = () if evidence.model_called else ("forward",)
    if evidence.loader.kind != "DataLoader":
        return ("outside", "host", "loss", *before)
    # What is done to a loader's batches before the model is called is the loop's own code, and told as that. After the
    # call, only a line that asks for batches by name shows that there is a second source of them.
    asks = any(row.phase == "loss" and "next batch" in row.tags and _NEXT.search(row.source) for row in evidence.lines)
    return ("loss", *before) if asks else before


def _batches(found: Anatomy, evidence: Evidence, phase: str) -> float:
    whole = found.each if phase == "outside" else found.shares.get(phase, 0.0)
    return whole * tagged(evidence, [phase], "next batch")


def _own_code(found: Anatomy, evidence: Evidence) -> tuple[float, float]:
    """Return the shares of the step in the model's phases in which no operator runs, and in which one does."""
    trace = evidence.trace
    # Waiting for other ranks is no operator either, nor are the stacks that anomaly detection records.
    elsewhere = evidence.world_size > 1 or evidence.anomaly_mode
    if trace is None or trace.operators_ms is None or elsewhere or found.step_s <= 0:
        return 0.0, 0.0
    # The usual step, as the traced ones are: a mean holds compilations and stalls.
    usual_s = statistics.median(sum(m.phases.get(phase, 0.0) for phase in COMPUTING) for m in evidence.steps)
    step_s = statistics.median(m.seconds for m in evidence.steps)
    booked = sum(found.shares.get(phase, 0.0) for phase in COMPUTING)
    computing_s, operators_s = usual_s * found.computing / booked if booked else 0.0, trace.operators_ms / 1e3
    if computing_s - OVERHEAD * operators_s < _MUCH * step_s:
        return 0.0, 0.0
    operators = found.computing * operators_s / computing_s
    return found.computing - operators, operators
