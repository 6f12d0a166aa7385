"""What the guard's comparison of a candidate costs, until one has been measured."""

from __future__ import annotations

from accel.search.actions import Candidate

_REPLAYS = {"model": 3.0, "optimizer": 0.5, "input": 0.0}
"""Steps that the comparison in one step takes about, by what is compared: replays of the step, two updates of a copy,
nothing."""
_INPUT_S, _INPUT_BATCHES = 0.1, 2
"""What acts on the input needs so long to begin: imports, threads; and makes so many batches to compare."""


def compared(candidate: Candidate) -> str:
    """Return which of the things that the guard compares of a candidate takes longest."""
    return max(candidate.touches, key=_REPLAYS.__getitem__)


def expected_s(compared: str, steps: int, step_s: float, data_s: float) -> float:
    """Return the seconds that a comparison will take about.

    Args:
        compared: "model", "optimizer" or "input".
        steps: in which it is made.
        step_s: seconds of a plain step.
        data_s: seconds of a batch's making, of these.
    """
    if compared == "input":
        return _INPUT_S + _INPUT_BATCHES * data_s
    return _REPLAYS[compared] * steps * step_s
