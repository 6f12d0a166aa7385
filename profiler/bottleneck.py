"""Name what a step is waiting for, from its phases.

A first, cautious naming: it tells apart what the host clock can see (`input`, `optimizer`, `compute`) and names nothing
else. Causes within compute need a trace.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from accel.profiler.phases import PHASES, Measurement


class Bottleneck(str, Enum):
    """What a step can be waiting for."""

    INPUT = "input"
    TRANSFER = "transfer"
    LAUNCH = "launch"
    COMPUTE = "compute"
    MEMORY = "memory"
    SYNC = "sync"
    COMMUNICATION = "communication"
    STRAGGLER = "straggler"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Finding:
    """The named bottleneck, its share of the step (0…1), and one sentence on what treats it."""

    bottleneck: Bottleneck
    share: float
    advice: str


_ADVICE = {
    Bottleneck.INPUT: "the loop waits for its loader: more workers, a cheaper transform or batched fetching would help",
    Bottleneck.OPTIMIZER: "the optimizer's own step is the largest part: a fused or foreach path would help",
    Bottleneck.COMPUTE: "forward and backward are the largest part: faster kernels or lower precision would help",
}


def anatomy(measurements: Sequence[Measurement]) -> dict[str, float]:
    """Return the median seconds of each phase over some steps, scaled so that they add up to the median step."""
    if not measurements:
        return {}
    medians = {phase: statistics.median(m.phases.get(phase, 0.0) for m in measurements) for phase in PHASES}
    total = sum(medians.values())
    step = statistics.median(m.seconds for m in measurements)
    return {phase: value * step / total for phase, value in medians.items()} if total > 0 else medians


def name(phases: Mapping[str, float]) -> Finding | None:
    """Name the bottleneck of a step with this anatomy, or None if nothing was measured.

    The data wait is called the bottleneck only when it outweighs the computation on its own: a loader that hides behind
    the computation waits for nothing.
    """
    total = sum(phases.values())
    if total <= 0:
        return None
    parts = {
        Bottleneck.INPUT: phases.get("data", 0.0),
        Bottleneck.OPTIMIZER: phases.get("optimizer", 0.0),
        Bottleneck.COMPUTE: phases.get("forward", 0.0) + phases.get("backward", 0.0),
    }
    largest = max(parts, key=lambda part: parts[part])
    return Finding(largest, parts[largest] / total, _ADVICE[largest])
