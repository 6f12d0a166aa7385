"""What an `ElasticSampler` notes of its steps: where they end, and where it is itself."""

from __future__ import annotations

from typing import NamedTuple


class DealtStep(NamedTuple):
    """One step as dealt: where it ends, and how many samples of it are no repeats, here and on all ranks."""

    stop: int
    fresh: int
    fresh_of_all: int


class SamplerPlace(NamedTuple):
    """Where a sampler is: epoch and samples of it, and its steps so far, with those before this epoch."""

    epoch: int
    position: int
    taken: int
    taken_before: int

    def at_epoch(self, epoch: int) -> SamplerPlace:
        """Return the beginning of an epoch, after as many steps."""
        return SamplerPlace(epoch, 0, self.taken, self.taken)
