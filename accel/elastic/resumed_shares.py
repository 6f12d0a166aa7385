"""With how many samples a rank goes on from a checkpoint, perhaps with other ranks or on another device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel.elastic.policy import Shares

_ALIKE = 0.95
"""Share of the memory that there was: what the system keeps to itself differs between devices of one kind."""


def resumed_shares(state: Mapping[str, Any], base: int, shares: int, most: int, memory: int) -> Shares:
    """Return how the first steps are dealt; the batch controller may take more at once when that has been rehearsed.

    Args:
        state: of the `BatchRun` before: the controller's batch, what fitted into a rank's memory, and its bytes.
        base: samples of a step as the user wrote it, over all ranks.
        shares: batches that a step's samples are dealt to, over all ranks.
        most: samples of a step allowed, over all ranks.
        memory: of the device that has the least, bytes; 0 if it is not known.

    Example:
        >>> state = {"controller": {"batch": 512}, "fits": 256, "memory": 80}
        >>> resumed_shares(state, 64, 2, 1024, memory=80), resumed_shares(state, 64, 2, 1024, memory=40)
        (Shares(local=256, steps=1), Shares(local=32, steps=1))
    """
    batch, is_alike = int(state["controller"]["batch"]), memory >= _ALIKE * state.get("memory", 0)
    # On fewer ranks the user's batch is more for each.
    known = max(int(state.get("fits", 1)) if is_alike else 1, -(-base // shares))
    local = max(1, min(round(batch / shares), most // shares, known))
    # Gradients that are kept take memory, too.
    return Shares(local, max(1, min(batch, most) // (shares * local)) if is_alike else 1)
