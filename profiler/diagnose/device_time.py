"""Steps by the device's clock: what a GPU does in each phase, or waits for in it.

The host runs ahead of a GPU until something makes it wait, and then waits for all that was queued before. By its clock
the work of a step therefore stands where the host waits, and not where it was asked for: in the copy of the next batch,
or in the line that reads the loss. On the device each interval holds its work or its idling, so that the loader, copies
and the loop's own code have only what no work of the device hides.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from accel.profiler.phases import PHASES, Measurement

MIN_TIMED = 10
"""Steps of which the device's times are known, for them to stand for others."""
UNSEEN = "what the GPU does in each phase: too few of its events were read, and all times are the host's"


def by_device(steps: Sequence[Measurement], taken: Mapping[int, Mapping[str, float]]) -> Sequence[Measurement]:
    """Return the steps with the device's times in place of the host's.

    Of the steps that were only timed by the host, what the queue hides is taken out. In a phase where the host is
    slower than the device by Δ on average, up to λ of each step is hidden, with λ such that Δ is taken out on average:
    a loader that is late every fourth time is late then, and a stall stays one. What is taken out goes to the phases in
    which the device is slower.

    Args:
        steps: as the host's clock has them.
        taken: number of a step → phase → s on the device.

    Returns:
        Other steps, or these same ones where too few have the device's times.
    """
    timed = [measured for measured in steps if measured.step in taken]
    if len(timed) < MIN_TIMED:
        return steps
    host = means(timed)
    device = {phase: statistics.fmean(taken[m.step].get(phase, 0.0) for m in timed) for phase in PHASES}
    hidden = {
        phase: level([m.phases.get(phase, 0.0) for m in timed], host[phase] - device[phase])
        for phase in PHASES
        if host[phase] > device[phase]
    }
    longer = {phase: device[phase] - host[phase] for phase in PHASES if device[phase] > host[phase]}
    return [_taken(m, taken[m.step]) if m.step in taken else _uncovered(m, hidden, longer) for m in steps]


def means(steps: Sequence[Measurement]) -> dict[str, float]:
    """Return the mean of each phase, s."""
    return {phase: statistics.fmean(m.phases.get(phase, 0.0) for m in steps) for phase in PHASES}


def level(waits: Sequence[float], mean: float) -> float:
    """Return λ for which the mean of min(wait, λ) is `mean`; the longest wait if that is not enough."""
    left = mean * len(waits)
    ordered = sorted(waits)
    for index, wait in enumerate(ordered):
        higher = len(ordered) - index
        if wait * higher >= left:
            return left / higher
        left -= wait
    return ordered[-1]


def _taken(measured: Measurement, phases: Mapping[str, float]) -> Measurement:
    held = {phase: phases.get(phase, 0.0) for phase in PHASES}
    return replace(measured, phases=held, seconds=sum(held.values()))


def _uncovered(measured: Measurement, hidden: Mapping[str, float], longer: Mapping[str, float]) -> Measurement:
    cuts = {phase: min(measured.phases.get(phase, 0.0), most) for phase, most in hidden.items()}
    removed, total = sum(cuts.values()), sum(longer.values())
    if not total:
        return measured
    given = {phase: removed * more / total for phase, more in longer.items()}
    phases = {p: measured.phases.get(p, 0.0) - cuts.get(p, 0.0) + given.get(p, 0.0) for p in PHASES}
    return replace(measured, phases=phases)
