"""The steps that a diagnosis is made of: by the clock that tells what was waited for, without one-offs.

**On a GPU** the host runs ahead until something makes it wait, and then waits for all that was queued before: by its
clock the work of a step stands where the host waits, as in the copy of the next batch. On the device each interval
holds its work or its idling, so that the loader, copies and the loop's own code have only what no work hides.

**Under DDP** the host's clock books the wait for other ranks to the backward pass; DDP's own clocks tell it apart.

**One-offs.** The mean step holds all that recurs: a stall every twenty steps is time too. A step that loads a library
or compiles a kernel, or in which the machine paused, does not recur: one of 4 s among 159 of 18 ms left 20 % of the
mean step to a loader that took 93 % of each. What has come twice recurs, however rare it is.
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
    """Return the steps with the device's times (`taken`, by number) in place of the host's.

    Of the steps that were only timed by the host, what the queue hides is taken out. In a phase where the host is
    slower than the device by Δ on average, up to λ of each step is hidden, with λ such that Δ is taken out on average:
    a loader that is late every fourth time is late then, and a stall stays one. What is taken out goes to the phases in
    which the device is slower. Where too few have the device's times, these same steps are returned.
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


def wait_as_communication(steps: Sequence[Measurement], wait_share: float | None) -> Sequence[Measurement]:
    """Return the steps with DDP's wait, a share of their time by DDP's own timers, as communication."""
    if not wait_share:
        return steps
    moved = []
    for measured in steps:
        backward = measured.phases.get("backward", 0.0)
        wait = min(wait_share * measured.seconds, backward)
        own = measured.phases.get("communication", 0.0)
        phases = {**measured.phases, "backward": backward - wait, "communication": own + wait}
        moved.append(replace(measured, phases=phases))
    return moved


_LEAST_STEPS = 20
_TIMES = 5.0
"""A one-off takes at least so many times as long as the median step."""
_WORTH = 0.01
"""Share of the run's time from which a one-off changes the picture."""
_WORKING = ("copy", "host", "forward", "loss", "backward", "communication", "optimizer")
"""A loader that is late, and what a loop does between two steps, are of the loop, however rare."""


def without_one_offs(steps: Sequence[Measurement]) -> tuple[list[Measurement], list[Measurement]]:
    """Split the run's steps into the ordinary ones and the one-off, if there is one; in fewer than 20 there is none."""
    if len(steps) < _LEAST_STEPS:
        return list(steps), []
    usual_s = statistics.median(map(_working_s, steps))
    least_s = max(_TIMES * statistics.median(m.seconds for m in steps), _WORTH * sum(m.seconds for m in steps))
    slow = [n for n, m in enumerate(steps) if _working_s(m) - usual_s > least_s]
    if len(slow) != 1:
        return list(steps), []
    return [m for n, m in enumerate(steps) if n not in slow], [steps[n] for n in slow]


def told_one_offs(ordinary: Sequence[Measurement], one_offs: Sequence[Measurement]) -> list[str]:
    """Return a sentence for each one-off."""
    sentences = []
    for slow in one_offs:
        phase = max(_WORKING, key=lambda name: slow.phases.get(name, 0.0))
        took = f"{slow.seconds * 1e3:,.0f} ms, {slow.phases[phase] * 1e3:,.0f} of them in {phase}"
        usual_ms = statistics.median(m.seconds for m in ordinary) * 1e3
        end = f"and an ordinary one {usual_ms:.3g} ms: it happened once, and is left out"
        sentences.append(f"step {slow.step} took {took}, {end}")
    return sentences


def _working_s(measured: Measurement) -> float:
    return sum(measured.phases.get(phase, 0.0) for phase in _WORKING)
