"""Several ranks, one decision: rank 0 decides at the end of an action, all others do as it says.

The ranks speak through the store of the process group, so that neither a GPU nor the gradients' communication is
touched, and only between two actions (some tens of steps), never in a step. Ranks that don't come within seconds are
not waited for: all go on plainly, and those that come later are told so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

if TYPE_CHECKING:
    from accel.comm.ranks.rendezvous import Rendezvous

T = TypeVar("T")
A = TypeVar("A")

PATIENCE_S, _MOST_S = 10.0, 60.0
"""Ranks meet at the same step, which their gradients have just been through together: they are apart by a part of it,
and of the guard's replays, so where these take long there is more patience. What one does alone there, such as saving
a checkpoint, may take longer now and then."""

_REMEDY = (
    "every rank must call accel.optimize and take as many steps as the others, so give each as many batches "
    "(DistributedSampler does; within join() they differ)"
)
_created = itertools.count()


class Failure(NamedTuple):
    """What went wrong, as the ranks have it."""

    text: str
    everywhere: bool
    """All ranks stop at this very step."""
    reported: bool = False
    """Another rank says so for all."""


def leads() -> bool:
    """Tell whether this process prints, whether the ranks have met or not."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


class Ranks:
    """The ranks of this run; with one process every call is a no-op.

    Made by all ranks at the same place, the first boundary between two steps, where they then join.
    """

    def __init__(self) -> None:
        self.distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.distributed else 0
        self.size = dist.get_world_size() if self.distributed else 1
        self._meeting: Rendezvous | None = None

    def join(self, since: float) -> None:
        """Come to the first meeting.

        Args:
            since: when this rank called `accel.optimize`, by the clock on the wall. What others gave up before that was
                another call of theirs, which this rank never made.
        """
        if not self.distributed:
            return
        from accel.comm.ranks.rendezvous import Rendezvous

        assert dist.group.WORLD is not None
        store = dist.group.WORLD.get_group_store()
        while self._meeting is None or self._meeting.given_up_before(since):
            prefix = f"accel-optimize/{next(_created)}"
            self._meeting = Rendezvous(PrefixStore(prefix, store), self.rank, self.size, PATIENCE_S, _REMEDY)

    @property
    def leads(self) -> bool:
        """True on the rank that decides and prints."""
        return self.rank == 0

    def decide(self, mine: T, decision: Callable[[list[T]], A], missed: str, step_s: float = 0.0) -> A:
        """Return on every rank what rank 0 decides from what each rank passed, by rank.

        Args:
            mine: what this rank has to say.
            decision: called on rank 0.
            missed: what a rank that doesn't come has not done, after "which".
            step_s: what the last step took, with all that was done after it.

        Raises:
            accel.comm.ranks.rendezvous.Apart: on every rank, if one does not come in time, has left, or rank 0 fails.
        """
        if self._meeting is None:
            return decision([mine])
        self._meeting.patience_s = max(PATIENCE_S, min(math.ceil(2 * step_s), _MOST_S))
        return self._meeting.meet(mine, decision, missed)

    def failure(self, error: Exception) -> Failure:
        """Tell what `error` is to the ranks: those that are apart all stop at this very step.

        Of another failure of this one the others hear when they meet next, and stop there.
        """
        text = f"{type(error).__name__}: {error}"
        if not self.distributed:
            return Failure(text, everywhere=True)
        from accel.comm.ranks.rendezvous import Apart, Left

        if not isinstance(error, Apart):
            return Failure(text, everywhere=False)
        if isinstance(error, Left):
            return Failure(str(error), everywhere=False)
        return Failure(str(error), everywhere=True, reported=error.by not in (None, self.rank))

    def check(self) -> None:
        """Raise `Apart` if the others have stopped already; one look at the store."""
        if self._meeting is not None:
            self._meeting.check()

    def leave(self, why: str) -> None:
        """Tell the other ranks that this one takes no part any more; they hear it when they meet next."""
        if self._meeting is not None:
            self._meeting.leave(f"rank {self.rank} {why}")
