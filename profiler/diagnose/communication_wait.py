"""DDP's wait for other ranks, which the host's clock books to the backward pass, booked to communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from accel.profiler.phases import Measurement


def wait_as_communication(steps: Sequence[Measurement], wait_share: float | None) -> Sequence[Measurement]:
    """Return the steps with DDP's wait moved from backward to communication.

    Args:
        steps: as the clocks measured them.
        wait_share: share of the steps' time, by DDP's own timers; None without DDP.
    """
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
