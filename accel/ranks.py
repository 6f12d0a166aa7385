"""Several ranks, one decision: rank 0 decides at the end of an action, all others do as it says.

The ranks speak over a gloo group of their own, so that neither a GPU nor the gradients' communication is touched, and
only between two actions (some tens of steps), never in a step.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

# Ranks meet at the same step; a rank that never comes has died or left the loop early.
_TIMEOUT = timedelta(minutes=5)


def leads() -> bool:
    """Tell whether this process prints, whether the ranks have met or not."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


class Ranks:
    """The ranks of this run; with one process every call is a no-op.

    Made by all ranks together, at the same place (`accel.optimize` is such a place, its first batch another).
    """

    def __init__(self) -> None:
        self.distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.distributed else 0
        self.size = dist.get_world_size() if self.distributed else 1
        self._group: Any = dist.new_group(backend="gloo", timeout=_TIMEOUT) if self.distributed else None

    @property
    def leads(self) -> bool:
        """True on the rank that decides and prints."""
        return self.rank == 0

    def decided(self, decision: Any) -> Any:
        """Return rank 0's `decision` on every rank."""
        if not self.distributed:
            return decision
        box = [decision]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def gathered(self, mine: Any) -> list[Any]:
        """Return what each rank passed, by rank, on every rank."""
        if not self.distributed:
            return [mine]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, mine, group=self._group)
        return everyone
