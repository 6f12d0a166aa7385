"""Draw an epoch's index lists before the loop asks for the epoch, and tell later whether they were the right ones.

The next epoch is drawn under a *copy* of the random state, in the order in which a `DataLoader` draws: the workers'
base seed first, then the sampler at its first index. When the loop does begin the epoch, the copy is compared with the
real state. If they are equal, the lists are exactly what the plain loader would have drawn, and the real state is
advanced as it would have been.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from accel.dataio.foreseen import Foreseen

States = list[torch.Tensor]


class Draws:
    """Index lists, and what drawing them does to the loader's own generators.

    A sampler may draw as it goes; `RandomSampler` draws once more when it is exhausted. Lists of an epoch that has not
    begun are drawn under states of their own, so that the loop finds its own as it left them.

    Args:
        loader: whose samplers yield `indices`.
        indices: the index lists.
        apart: random states to draw under until `begin`; None to draw under the loop's.
    """

    def __init__(self, loader: DataLoader[Any], indices: Iterator[Any], apart: States | None = None) -> None:
        self._loader, self._indices, self._apart = loader, indices, apart
        self._own = _generators(loader)
        self._real: States | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._apart is None:
            return next(self._indices)
        self._real = capture(self._loader)
        restore(self._loader, self._apart)
        try:
            return next(self._indices)
        finally:
            self._apart = capture(self._loader)
            self.mend()

    def mend(self) -> None:
        """Put the loop's random states back where Ctrl-C came while a list was drawn under others."""
        if self._real is not None:
            restore(self._loader, self._real)
            self._real = None

    def begin(self) -> None:
        """Begin the epoch: what it has drawn so far counts now."""
        if self._apart is not None:
            restore(self._loader, self._apart)
            self._apart = None

    def drew(self, since: States) -> bool:
        """Tell whether these lists needed random numbers, apart from the loop's: they moved the states `since`."""
        return self._apart is not None and not same(self._apart, since)

    def keep(self) -> None:
        """Begin the epoch and leave the random states alone: these lists needed none."""
        self._apart = None

    def generators(self) -> States:
        """Return the states of the loader's own generators, as these draws left them."""
        return [g.get_state() for g in self._own] if self._apart is None else self._apart[1:]


@dataclass
class Ahead:
    """The next epoch's index lists, drawn ahead, with what must still hold when it begins."""

    before: States
    began: States
    """Random states once the epoch has begun, before its first list is drawn."""
    draws: Draws
    base_seed: int
    epoch: int | None
    foreseen: Foreseen


def ordering(loader: DataLoader[Any]) -> Any:
    """Return the sampler that gives the order: the one inside a plain `BatchSampler`, else what yields the batches."""
    outer: Any = loader._index_sampler
    return outer.sampler if type(outer) is BatchSampler else outer


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    own = [loader.generator, getattr(ordering(loader), "generator", None)]
    found: list[torch.Generator] = []
    for generator in own:
        if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
            found.append(generator)
    return found


def put_back(loader: DataLoader[Any], drawn: States, wanted: States) -> None:
    """Set the loader's own generators to `wanted` if nobody but us has drawn from them since they were in `drawn`."""
    for generator, left, state in zip(_generators(loader), drawn, wanted, strict=True):
        if torch.equal(generator.get_state(), left):
            generator.set_state(state)


def capture(loader: DataLoader[Any]) -> States:
    """Return the random states that a loader may draw from: torch's own, and those of its generators."""
    return [torch.get_rng_state(), *(generator.get_state() for generator in _generators(loader))]


def restore(loader: DataLoader[Any], state: States) -> None:
    """Put back what `capture` returned."""
    torch.set_rng_state(state[0])
    restore_own(loader, state[1:])


def restore_own(loader: DataLoader[Any], state: States) -> None:
    """Set the loader's own generators, without torch's."""
    for generator, saved in zip(_generators(loader), state, strict=True):
        generator.set_state(saved)


def epoch_of(loader: DataLoader[Any]) -> int | None:
    """Return the sampler's epoch, or None if it counts none."""
    epoch = getattr(ordering(loader), "epoch", None)
    return epoch if type(epoch) is int else None


def set_epoch(loader: DataLoader[Any], epoch: int) -> None:
    """Set the epoch that the sampler counts, if it counts any."""
    if epoch_of(loader) is not None:
        ordering(loader).epoch = epoch


def foreseeable(loader: DataLoader[Any]) -> bool:
    """Tell whether the loader's next epoch can be drawn ahead: the sampler can, or is known to draw when it begins."""
    sampler = ordering(loader)
    if _foresees(loader):
        return epoch_of(loader) is not None
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler) in (SequentialSampler, DistributedSampler)


def _foresees(loader: DataLoader[Any]) -> bool:
    return hasattr(loader._index_sampler, "foresee")


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
    before, epoch = capture(loader), epoch_of(loader)
    following = None if epoch is None else epoch + step
    try:
        seed = base_seed(loader) if seeded is None else seeded
        foreseen = _foresee(loader, following)
        began = capture(loader)
        first = None if foreseen is None else next(foreseen.lists, None)
        after = capture(loader)
    finally:
        restore(loader, before)
        if epoch is not None:
            set_epoch(loader, epoch)
    if foreseen is None or first is None:
        return None
    draws = Draws(loader, itertools.chain([first], foreseen.lists), after)
    return Ahead(before, began, draws, seed, following, foreseen)


def _foresee(loader: DataLoader[Any], epoch: int | None) -> Foreseen | None:
    """Return the next pass; the sampler's epoch may be another afterwards."""
    sampler: Any = loader._index_sampler
    if _foresees(loader):
        foreseen: Foreseen | None = sampler.foresee(epoch)
        return foreseen
    if epoch is not None:
        set_epoch(loader, epoch)
    return Foreseen(iter(sampler))


def draw_as_exhausted(loader: DataLoader[Any]) -> None:
    """Draw what a `RandomSampler` with a generator of its own draws when it comes to its end, and yields nothing of."""
    sampler = ordering(loader)
    if type(sampler) is RandomSampler and sampler.generator is not None and not sampler.replacement:
        torch.randperm(len(sampler.data_source), generator=sampler.generator)


def same_draws(loader: DataLoader[Any], ahead: Ahead) -> bool:
    """Tell whether the random states are those under which `ahead` was drawn."""
    return same(capture(loader), ahead.before)


def same(one: States, other: States) -> bool:
    """Tell whether two lists of random states are equal."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
