"""What the guard's comparison of a candidate costs, until one has been measured."""

from __future__ import annotations

from accel.guard.guard import Comparison
from accel.profiler.bottleneck import Bottleneck
from accel.search.actions import Candidate

_REPLAYS = {"model": 3.0, "optimizer": 0.5, "input": 0.0}
"""Steps that the comparison in one step takes about, by what is compared: replays of the step, two updates of a copy,
nothing."""
_INPUT_S, _INPUT_BATCHES = 0.1, 2
"""What fetches batches otherwise needs so long to begin: imports, threads; and makes so many batches to compare."""
_HANDED_ON = "batches handed on"
_HANDED_ON_S = 0.011
"""What hands batches on otherwise (`pin_memory`) needs none of that: measured on an H200, its import included."""


def compared(candidate: Candidate) -> str:
    """Return which of the things that the guard compares of a candidate takes longest."""
    longest = max(candidate.touches, key=_REPLAYS.__getitem__)
    return _HANDED_ON if longest == "input" and Bottleneck.INPUT not in candidate.treats else longest


def expected_s(compared: str, steps: int, step_s: float, data_s: float) -> float:
    """Return the seconds that a comparison will take about.

    Args:
        compared: what `compared` has returned.
        steps: in which it is made.
        step_s: seconds of a plain step.
        data_s: seconds of a batch's making, of these.
    """
    if compared == _HANDED_ON:
        return _HANDED_ON_S
    if compared == "input":
        return _INPUT_S + _INPUT_BATCHES * data_s
    return _REPLAYS[compared] * steps * step_s


def measured_s(finding: Comparison | None, steps: int, cost_s: float) -> float:
    """Return what the next comparison of the same kind is expected to take, from one that was made.

    The first step of a comparison has work in it that is done once: cuDNN plans its algorithms and times them, graphs
    are captured, libraries are loaded. So its last one counts, as often as there are steps.

    Args:
        finding: what the comparison has found.
        steps: in which the next one will be made.
        cost_s: what all of it has cost.
    """
    return steps * finding.seconds if finding is not None and finding.seconds else cost_s
