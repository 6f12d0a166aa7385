"""Tell steps that were slow once from the run's ordinary ones.

The mean step holds all that recurs: a stall every twenty steps is time too. A step that loads a library or compiles a
kernel, or in which the machine paused, does not recur, and may take longer than all others together: one of 4 s among
159 of 18 ms left 20 % of the mean step to a loader that held up each of them for 93 % of its time. What has come twice
recurs, however rare it is: an update that takes 4 s every 200 steps of 10 ms, as one that computes the roots of its
preconditioners does, is two thirds of the run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from accel.profiler.phases import Measurement

_MIN_STEPS = 20
_TIMES = 5.0
"""A one-off takes at least so many times as long as the median step."""
_WORTH = 0.01
"""Share of the run's time from which a one-off changes the picture."""
_WORKING = ("copy", "host", "forward", "loss", "backward", "communication", "optimizer")
"""A loader that is late, and what a loop does between two steps, are of the loop, however rare."""


def split(steps: Sequence[Measurement]) -> tuple[list[Measurement], list[Measurement]]:
    """Split steps into the ordinary ones and the one-offs.

    Args:
        steps: of the whole run, in order.

    Returns:
        Both in order. There is one one-off at most, and none in fewer than 20 steps.
    """
    if len(steps) < _MIN_STEPS:
        return list(steps), []
    usual_s = statistics.median(map(_working_s, steps))
    least_s = max(_TIMES * statistics.median(m.seconds for m in steps), _WORTH * sum(m.seconds for m in steps))
    slow = [n for n, m in enumerate(steps) if _working_s(m) - usual_s > least_s]
    if len(slow) != 1:
        return list(steps), []
    return [m for n, m in enumerate(steps) if n not in slow], [steps[n] for n in slow]


def told(ordinary: Sequence[Measurement], one_offs: Sequence[Measurement]) -> list[str]:
    """Return a sentence for each one-off."""
    usual_ms = statistics.median(m.seconds for m in ordinary) * 1e3 if one_offs else 0.0
    return [_sentence(m, usual_ms) for m in one_offs]


def _sentence(slow: Measurement, usual_ms: float) -> str:
    phase = max(_WORKING, key=lambda name: slow.phases.get(name, 0.0))
    return (
        f"step {slow.step} took {slow.seconds * 1e3:,.0f} ms, {slow.phases[phase] * 1e3:,.0f} of them in {phase}, and "
        f"an ordinary one {usual_ms:.3g} ms: it happened once, and is left out"
    )


def _working_s(measured: Measurement) -> float:
    return sum(measured.phases.get(phase, 0.0) for phase in _WORKING)
