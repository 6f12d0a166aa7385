"""Draw an epoch's index lists before the loop asks for the epoch, and tell later whether they were the right ones.

The next epoch is drawn under a *copy* of the random state, in the order in which a `DataLoader` draws: the workers'
base seed first, then the sampler at its first index. When the loop does begin the epoch, the copy is compared with the
real state. If they are equal, the lists are exactly what the plain loader would have drawn, and the real state is
advanced as it would have been.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Ahead:
    """The next epoch's index lists, drawn ahead, with what must still hold when it begins."""

    before: list[torch.Tensor]
    after: list[torch.Tensor]
    indices: Iterator[Any]
    base_seed: int
    epoch: int | None


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    own = [loader.generator, getattr(loader.sampler, "generator", None)]
    found: list[torch.Generator] = []
    for generator in own:
        if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
            found.append(generator)
    return found


def capture(loader: DataLoader[Any]) -> list[torch.Tensor]:
    """Return the random states that a loader may draw from: torch's own, and those of its generators."""
    return [torch.get_rng_state(), *(generator.get_state() for generator in _generators(loader))]


def restore(loader: DataLoader[Any], state: list[torch.Tensor]) -> None:
    """Put back what `capture` returned."""
    torch.set_rng_state(state[0])
    for generator, saved in zip(_generators(loader), state[1:], strict=True):
        generator.set_state(saved)


def epoch_of(loader: DataLoader[Any]) -> int | None:
    """Return the sampler's epoch, or None if it counts none."""
    for sampler in (loader.batch_sampler, loader.sampler):
        epoch = getattr(sampler, "epoch", None)
        if type(epoch) is int:
            return epoch
    return None


def set_epoch(loader: DataLoader[Any], epoch: int) -> None:
    """Set the epoch that the sampler counts, if it counts any."""
    for sampler in (loader.batch_sampler, loader.sampler):
        if type(getattr(sampler, "epoch", None)) is int:
            sampler.epoch = epoch  # type: ignore[union-attr]
            return


def foreseeable(loader: DataLoader[Any]) -> bool:
    """Tell whether the loader's next epoch can be drawn ahead: known samplers that draw everything when they begin."""
    batches, sampler = loader.batch_sampler, loader.sampler
    if batches is not None and type(batches) is not BatchSampler:
        return False
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler) in (SequentialSampler, DistributedSampler)


def base_seed(loader: DataLoader[Any]) -> int:
    """Draw the base seed of the workers, as a `DataLoader` does when an epoch begins."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())


def begin(loader: DataLoader[Any], *, seeded: int | None = None) -> tuple[Iterator[Any], int]:
    """Begin an epoch as the plain loader would: return its index lists and the base seed.

    Args:
        loader: map-style loader.
        seeded: the base seed, if it is not to be drawn: persistent workers keep theirs.
    """
    seed = base_seed(loader) if seeded is None else seeded
    return iter(loader._index_sampler), seed


def draw_ahead(loader: DataLoader[Any], *, step: int = 1, seeded: int | None = None) -> Ahead | None:
    """Draw the next epoch's index lists under a copy of the random state; None if they can't be foreseen or are none.

    Args:
        loader: map-style loader.
        step: by how much the sampler's epoch is expected to move on.
        seeded: see `begin`.
    """
    if not foreseeable(loader):
        return None
    before = capture(loader)
    epoch = epoch_of(loader)
    try:
        if epoch is not None:
            set_epoch(loader, epoch + step)
        stream, seed = begin(loader, seeded=seeded)
        first = next(stream, None)
        after = capture(loader)
    finally:
        restore(loader, before)
        if epoch is not None:
            set_epoch(loader, epoch)
    if first is None:
        return None
    return Ahead(before, after, _chain(first, stream), seed, None if epoch is None else epoch + step)


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def same_draws(loader: DataLoader[Any], ahead: Ahead) -> bool:
    """Tell whether the random states are those under which `ahead` was drawn."""
    now = capture(loader)
    return len(now) == len(ahead.before) and all(torch.equal(a, b) for a, b in zip(now, ahead.before, strict=True))
