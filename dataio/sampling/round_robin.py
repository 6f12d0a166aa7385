"""Assign the places of one step to the ranks round robin: one to each in turn, while its batch has room.

With batch sizes b_r, round j = 1, 2, … ends after E_j = Σ_r min(b_r, j) places; the whole step takes G = Σ_r b_r. With
equal batches rank r of W gets places r, r + W, r + 2W, …, which is how torch's DistributedSampler divides an epoch.

What is done at the end of an epoch, when m < G places are left:

| tail | the last step takes | each sample comes |
|---|---|---|
| pad | the least E_j ≥ m: repeats from the epoch's beginning end the round | at least once; < W repeats |
| drop | the greatest E_j ≤ m: a round that cannot be ended is left out | at most once; < W never |
| uneven | m | exactly once |
| fill | max(m, W) | exactly once, but for < W repeats where m < W |

"pad" and "drop" are DistributedSampler's drop_last=False and True. The number of steps is a function of the batch sizes
and of what is left, so it is the same on every rank. After "pad" and "drop" ranks have equally many, or as many as
their smaller batch holds. Under "uneven" the last two steps share their samples where m < W would leave a rank without
any, so that each has one in both; only where there are too few for that (n < W, batches of 1, or an epoch that is
resumed with m < W left) does a rank get an empty batch, of which few loops can take a step. "fill" is "uneven", but
such a rank gets a repeat. With `least` = 2 they share them under each tail where m < 2·W would leave a rank with a
single sample, of which batch norm can't train.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from accel.profiler.errors import InvalidArgument

Tail = Literal["pad", "drop", "uneven", "fill"]


class RoundRobin:
    """Tell which places of the next step are one rank's, and how many the step takes.

    Args:
        sizes: batch size of each rank, samples, at least 1.
        rank: this one, an index into `sizes`.
        tail: what becomes of a last step that doesn't fill all batches; see the module.
        drops: places at the epoch's end that are left out; None for those of a step that would not fill all batches.
        least: samples of each rank in the last step, as far as the last two have enough for that.

    Raises:
        InvalidArgument: if a size is less than 1, or `tail` is unknown.

    Example:
        >>> [RoundRobin([4, 2], rank, "pad").mine(6).tolist() for rank in range(2)]
        [[0, 2, 4, 5], [1, 3]]
    """

    def __init__(self, sizes: Sequence[int], rank: int, tail: Tail, *, drops: int | None = 0, least: int = 1) -> None:
        if min(sizes) < 1:
            raise InvalidArgument(f"batch_size must be at least 1 on every rank, got {min(sizes)}")
        if tail not in get_args(Tail):
            raise InvalidArgument(f"tail must be one of {get_args(Tail)}, got {tail!r}")
        self.sizes, self.tail, self._drops = tuple(sizes), tail, drops
        self._ranks, self._least = len(sizes), min(least, *sizes)
        self._ends = np.cumsum(_with_room(sizes, max(sizes)))
        before = np.concatenate([[0], self._ends[: sizes[rank] - 1]])
        self._places = before + _with_room(sizes[:rank], sizes[rank])
        self._all = int(self._ends[-1])
        self._plenty = self._all + self._least * self._ranks
        """Places from which on a full step leaves enough for another one."""

    def mine(self, width: int) -> NDArray[np.int64]:
        """Return this rank's places, ascending, of a step that takes `width` places."""
        return self._places[: self.count(width)]

    def count(self, places: int) -> int:
        """Return how many of the step's first `places` are this rank's."""
        return len(self._places) if places >= self._all else int(np.searchsorted(self._places, places))

    def width(self, left: int) -> int:
        """Return how many places the next step takes when `left` are left of the epoch; 0 if it is over."""
        return self._width(self._dealt(left))

    def _width(self, left: int) -> int:
        if left >= self._plenty:
            return self._all
        return self._shared(left) or self._all if left >= self._all else self._last(left)

    def _dealt(self, left: int) -> int:
        """Return how many of the places left are dealt."""
        return max(0, left - (self.unfilled(left) if self._drops is None else self._drops))

    def unfilled(self, left: int) -> int:
        """Return how many of the places left are those of a last step that would not fill all batches."""
        rest = left % self._all
        return rest if self._last(rest) < self._all else 0

    def ahead(self, left: int, most: int) -> NDArray[np.int64]:
        """Return this rank's places in the next step and in those after it that are dealt alike, one row per step.

        Args:
            left: places left of the epoch, more than 0; the first of them is place 0.
            most: places to return, but for a single step's; what bounds memory.
        """
        left = self._dealt(left)
        width = self._width(left)
        alike = (left - self._least * self._ranks) // self._all  # with fewer left after a step, it may be shared
        rows = max(1, min(most // len(self._places), alike))
        return width * np.arange(rows)[:, None] + self.mine(width)

    def steps(self, left: int) -> int:
        """Return how many steps are to come when `left` places are left."""
        full, rest = divmod(self._dealt(left), self._all)
        return full + (self._last(rest) > 0)

    def _shared(self, left: int) -> int:
        """Return the places of this step if it shares with the last one, where a rank would have too few; else 0."""
        least, rest = min(self._least, left // (2 * self._ranks)), left - self._all
        if not (0 < rest < least * self._ranks and self._last(rest)):
            return 0
        if self.tail in ("uneven", "fill"):
            return (left + 1) // 2
        return self._ended(left // 2) if least > 1 else 0

    def _last(self, left: int) -> int:
        if left == 0 or self.tail == "uneven":
            return left
        if self.tail == "fill":
            return max(left, self._ranks)
        if self.tail == "pad":
            return int(self._ends[np.searchsorted(self._ends, left)])
        return self._ended(left)

    def _ended(self, places: int) -> int:
        """Return the end of the last round that so many places are enough for."""
        ended = int(np.searchsorted(self._ends, places, side="right"))
        return int(self._ends[ended - 1]) if ended else 0


def _with_room(sizes: Sequence[int], rounds: int) -> NDArray[np.int64]:
    """Return how many of the batches have room in each of the rounds 1 to `rounds`: Σ_r [b_r ≥ j]."""
    full_after = np.bincount(np.minimum(np.asarray(sizes, dtype=np.int64), rounds), minlength=rounds + 1)
    return len(sizes) - np.cumsum(full_after)[:rounds]


def world(num_replicas: int | None = None, rank: int | None = None) -> tuple[int, int]:
    """Return the number of ranks and this one, from the process group where they are not given.

    Args:
        num_replicas: number of ranks; default the process group's, or 1 outside torchrun.
        rank: this one; default the process group's, or 0 if it is the only one.

    Raises:
        InvalidArgument: if they are out of range or cannot be known: every rank taking itself for the only one would go
            unnoticed.

    Example:
        >>> world(4, 3)
        (4, 3)
    """
    grouped = dist.is_available() and dist.is_initialized()
    if num_replicas is None:
        num_replicas = dist.get_world_size() if grouped else 1
        started = os.environ.get("WORLD_SIZE", "1")
        if not grouped and started != "1":
            raise InvalidArgument(
                f"num_replicas must be given or known from a process group, got None and WORLD_SIZE={started}; "
                "call torch.distributed.init_process_group first"
            )
    if rank is None:
        if not grouped and num_replicas != 1:
            raise InvalidArgument(
                f"rank must be given without a process group, got None for num_replicas={num_replicas}"
            )
        rank = dist.get_rank() if grouped else 0
    if not 0 <= rank < num_replicas:
        raise InvalidArgument(f"rank must be at least 0 and less than num_replicas={num_replicas}, got {rank}")
    return num_replicas, rank
