"""What keeps batches from being made ahead: a dataset that the loop changes, a sampler that draws as it goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from accel.dataio.engine.engine import BatchJob
from accel.dataio.fetching.randomness import random_state
from accel.dataio.passes import epochs

# Index lists that a sampler is watched for, 0.1 ms each, and those after which lists are drawn early.
_WATCHED, _QUIET = 16, 2


class DatasetMoves(RuntimeError):
    """The loop keeps changing the dataset within an epoch."""


class SamplerDraws(RuntimeError):
    """The sampler draws index lists one by one from the program's own random generators."""

    def __init__(self) -> None:
        super().__init__(
            "the sampler draws each index list from the program's own random generators: drawn early, the loop's own "
            "random numbers would be others. Found: a generator that had moved; give the sampler one of its own"
        )


class EarlyDraws:
    """Know whether index lists may be drawn before the loop asks for their batches.

    torch's samplers draw all that they need of the program's generators at their first list, and so do those that can
    peek. Of others the first lists are drawn when they are asked for, and the generators looked at.

    Args:
        loader: whose sampler it is.
        watched: whether to look at all; if not, lists are drawn early.

    Attributes:
        moves: whether a list after the first was seen to move them.
    """

    def __init__(self, loader: DataLoader[Any], *, watched: bool) -> None:
        known = epochs.of_torch(loader) or epochs.can_peek(loader)
        self._left = _WATCHED if watched and not known else 0
        self.moves = False

    @property
    def allowed(self) -> bool:
        """Whether to draw before the loop asks."""
        return not self.moves and self._left <= _WATCHED - _QUIET

    def next(self, jobs: Iterator[BatchJob]) -> BatchJob | None:
        """Return the next job, None at the end."""
        if not self._left:
            return next(jobs, None)
        before = random_state()
        job = next(jobs, None)
        if job is not None and job.number:  # at its first list a sampler may draw a seed
            self._left -= 1
            if random_state() != before:  # another thread may have drawn, but nobody can tell
                self.moves, self._left = True, 0
        return job
