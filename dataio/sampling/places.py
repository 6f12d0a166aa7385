"""Where an `ElasticSampler` is, and what it notes of the steps that it deals."""

from __future__ import annotations

from typing import NamedTuple


class SamplerPlace(NamedTuple):
    """Epoch, samples of it, and steps since the sampler was made, with those before this epoch."""

    epoch: int
    position: int
    taken: int
    taken_before: int


class DealtStep(NamedTuple):
    """One step as dealt: where the sampler is after it, and how many of its samples are no repeats."""

    place: SamplerPlace
    fresh: int
    """Of this rank."""
    fresh_of_all: int
