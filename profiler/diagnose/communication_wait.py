"""DDP's wait for other ranks, which the host's clock sees within the backward pass, as communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from accel.profiler.phases import Measurement


def exchanged(steps: Sequence[Measurement], wait_share: float | None) -> Sequence[Measurement]:
    """Return the steps with DDP's wait moved from backward to communication.

    Args:
        steps: as the clocks have them.
        wait_share: share of the steps' time, by DDP's own clocks; None without DDP.
    """
    if not wait_share:
        return steps
    found = []
    for one in steps:
        backward = one.phases.get("backward", 0.0)
        wait = min(wait_share * one.seconds, backward)
        own = one.phases.get("communication", 0.0)
        phases = {**one.phases, "backward": backward - wait, "communication": own + wait}
        found.append(replace(one, phases=phases))
    return found
