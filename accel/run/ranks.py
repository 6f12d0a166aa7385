"""Agreement between ranks: rank 0 decides at the end of an action, and all others follow.

The ranks exchange messages through the store of the process group, so that neither a GPU nor the communication of
gradients is touched, and only between two actions (some tens of steps), never in a step. A rank that doesn't arrive
within seconds is not waited for: all ranks continue plainly, and a late one finds that out when it arrives.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore

from accel.profiler.rendezvous import RankLeft, RanksDiverged, Rendezvous

T = TypeVar("T")
A = TypeVar("A")

PATIENCE_S, _MOST_S = 10.0, 60.0
"""Ranks meet at the same step, after the gradients of that step were reduced together. So they arrive within a part of
a step and of the guard's replays, and the timeout grows where these take long. What a rank does alone at that point,
such as saving a checkpoint, may occasionally take longer."""

_REMEDY = (
    "every rank must call accel.optimize and take as many steps as the others, so give each as many batches "
    "(DistributedSampler does; within join() they differ)"
)
STARTED_BY_SCRIPT = (
    "nothing is made faster: the script has started its other ranks itself, without accel; start them all with "
    "torchrun --nproc-per-node N -m accel run, or use LightningCallback"
)
_created = itertools.count()


class Failure(NamedTuple):
    """A failure, and how many ranks it concerns."""

    text: str
    everywhere: bool
    """All ranks stop at this very step."""
    reported: bool = False
    """Another rank reports it for all."""


def leads() -> bool:
    """Return whether this process prints, whether the ranks have met or not."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def are_several() -> bool:
    """Return whether other processes take part in the training."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def are_launched() -> bool:
    """Return whether the environment tells how many ranks there are."""
    return "WORLD_SIZE" in os.environ


def are_started_by_script(were_launched: bool) -> bool:
    """Return whether the script has started the other ranks itself, as Lightning does: without accel.

    It has then told them by the environment how many they are, and has no number itself, which a script that is started
    once for each rank has.

    Args:
        were_launched: what `are_launched` returned when the script began.
    """
    return are_several() and are_launched() and not were_launched and "RANK" not in os.environ


def begin_anew() -> None:
    """Count meetings from the first one: the process group is another one, of which some may be new processes."""
    global _created
    _created = itertools.count()


class Ranks:
    """The ranks of this run; with one process every call is a no-op.

    Created by all ranks at the same place, the first step boundary, where they then join.
    """

    def __init__(self) -> None:
        self.distributed = are_several()
        self.rank = dist.get_rank() if self.distributed else 0
        self.size = dist.get_world_size() if self.distributed else 1
        self._meeting: Rendezvous | None = None

    def join(self, since: float) -> None:
        """Join the first meeting.

        Args:
            since: when this rank called `accel.optimize`, in wall-clock time. A meeting that others gave up before that
                belongs to an earlier call of theirs, which this rank never made.
        """
        if not self.distributed:
            return
        assert dist.group.WORLD is not None
        store = dist.group.WORLD.get_group_store()
        while self._meeting is None or self._meeting.given_up_before(since):
            prefix = f"accel-optimize/{next(_created)}"
            self._meeting = Rendezvous(PrefixStore(prefix, store), self.rank, self.size, PATIENCE_S, _REMEDY)

    def at_work(self) -> contextlib.AbstractContextManager[None]:
        """Have the others wait for this rank at the next meeting as long as the block lasts, ten minutes at most."""
        return contextlib.nullcontext() if self._meeting is None else self._meeting.life.at_work()

    @property
    def leads(self) -> bool:
        """True on the rank that decides and prints."""
        return self.rank == 0

    def decide(self, mine: T, decision: Callable[[list[T]], A], missed: str, step_s: float = 0.0) -> A:
        """Return on every rank what rank 0 decides from what each rank passed, by rank.

        Args:
            missed: what a missing rank has failed to do, to follow "which" in the error message.
            step_s: seconds of the last step, including everything done after it.

        Raises:
            accel.profiler.rendezvous.RanksDiverged: on every rank, if one does not come in time, has left, or rank 0
                fails.
        """
        if self._meeting is None:
            return decision([mine])
        self._meeting.patience_s = max(PATIENCE_S, min(math.ceil(2 * step_s), _MOST_S))
        return self._meeting.meet(mine, decision, missed)

    def failure(self, error: Exception, model: nn.Module) -> Failure:
        """Classify `error`: when the ranks have come apart, all of them stop at this very step.

        The others learn of any other failure of this rank at the next meeting, and stop there. Within DDP's `join()`
        they may have ended their steps before this one.
        """
        text = f"{type(error).__name__}: {error}"
        if not self.distributed:
            return Failure(text, everywhere=True)
        if not isinstance(error, RanksDiverged):
            return Failure(text, everywhere=False)
        join = getattr(model, "_join_config", None)
        is_within_join = join is not None and bool(join.enable)
        are_apart = not isinstance(error, RankLeft)
        return Failure(
            str(error),
            everywhere=are_apart and not is_within_join,
            reported=are_apart and error.by not in (None, self.rank),
        )

    def is_late(self, error: Exception) -> bool:
        """Return whether ranks have come apart although none has left: a missing one may still come."""
        if not self.distributed or not isinstance(error, RanksDiverged):
            return False
        return not isinstance(error, RankLeft) and error.by is not None

    def check(self) -> None:
        """Raise `RanksDiverged` if the others have stopped already; reads the store once."""
        if self._meeting is not None:
            self._meeting.check()

    def all_came(self) -> bool:
        """Return whether those that were missing have come by now, after `decide` has raised `RanksDiverged`.

        Ask at the same steps on all ranks: those that get True meet again at once.
        """
        return self._meeting is not None and self._meeting.all_came()

    def leave(self, why: str) -> None:
        """Announce to the other ranks that this one has left; they learn it at the next meeting."""
        if self._meeting is not None:
            self._meeting.leave(f"rank {self.rank} {why}")


def refuse_unlike(by_rank: list[tuple[str, ...]]) -> None:
    """Raise `RanksDiverged` if a rank does not have, in words, what rank 0 has."""
    for rank, own in enumerate(by_rank):
        for its, first in zip(own, by_rank[0], strict=True):
            if its != first:
                remedy = "all must have the same, so a pipeline's stages are left as they are"
                raise RanksDiverged(f"rank {rank} has {its}, and rank 0 {first}; {remedy}")
