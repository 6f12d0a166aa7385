"""The index lists of an epoch: drawn early, and seen to be the right ones.

The next epoch is drawn under a *copy* of the random state, in the order in which a `DataLoader` draws: the workers'
base seed first, then the sampler at its first index. When the loop does begin the epoch, the copy is compared with the
real state. If they are equal, the lists are exactly what the plain loader would have drawn, and the real state is
advanced as it would have been, by the same draws.

torch's own generator is one for all threads. So it is not written here: torch's samplers draw from a copy of it. The
next epoch of a sampler with a method `peek_epoch` that draws from it is not known.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from accel.dataio.peek import PeekedEpoch

_MOST_WRONG = 3  # guesses in a row, after which the next epoch is not guessed any more
_PLAIN = (int, float, bool, str, type(None))

States = list[torch.Tensor]
"""Of torch's own generator, and of the loader's."""


class Draws:
    """Index lists, and what drawing them does to the loader's own generators.

    A sampler may draw as it goes; `RandomSampler` draws once more when it is exhausted. Lists of an epoch that has not
    begun are drawn under states of their own, so that the loop finds its own as it left them.

    Args:
        loader: whose samplers yield `indices`.
        indices: the index lists.
        apart: random states to draw under until `begin`; None to draw under the loop's.
        global_draws: numbers that the lists need of torch's own generator, drawn when the epoch begins.
    """

    def __init__(
        self, loader: DataLoader[Any], indices: Iterator[Any], apart: States | None = None, global_draws: int = 0
    ) -> None:
        self._loader, self._lists, self._apart = loader, indices, apart
        self._global_draws = global_draws
        self._own = _generators(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._apart is None:
            return next(self._lists)
        real = capture(self._loader)[1:]
        restore_own(self._loader, self._apart[1:])
        try:
            return next(self._lists)
        finally:
            self._apart = [self._apart[0], *capture(self._loader)[1:]]
            restore_own(self._loader, real)

    def begin(self) -> None:
        """Begin the epoch: what it has drawn so far counts now."""
        if self._apart is not None:
            restore_own(self._loader, self._apart[1:])
            _advance(self._global_draws)
            self._apart = None

    def begin_apart(self, since: States) -> bool:
        """Begin the epoch and leave the random states alone; return False if these lists have moved them `since`."""
        if self._apart is None or same(self._apart, since):
            self._apart = None
        return self._apart is None

    def generators(self) -> States:
        """Return the states of the loader's own generators, as these draws left them."""
        return [g.get_state() for g in self._own] if self._apart is None else self._apart[1:]

    def put_back(self, drawn: States, wanted: States) -> None:
        """Set the loader's own generators to `wanted` if nobody but us has drawn from them since `drawn`."""
        for generator, left, state in zip(self._own, drawn, wanted, strict=True):
            if torch.equal(generator.get_state(), left):
                generator.set_state(state)

    def draw_again(self, drawn: States, wanted: States) -> None:
        """Draw what leads from `drawn` to `wanted`, of which the lists are known."""
        sampler = ordering(self._loader)
        if type(sampler) is RandomSampler and sampler.generator is not None and not sampler.replacement:
            torch.randperm(len(sampler.data_source), generator=sampler.generator)  # as at its end; it yields none of it
        else:
            self.put_back(drawn, wanted)


@dataclass
class Ahead:
    """The next epoch's index lists, drawn ahead, with what must still hold when it begins."""

    before: States
    began: States
    """Random states once the epoch has begun, before its first list is drawn."""
    base_draws: int
    """Numbers that the base seed needs of torch's own generator."""
    lengths: tuple[int, ...]
    """Of dataset and sampler, when the lists were drawn."""
    settings: list[tuple[Any, dict[str, Any]]]
    """Of torch's samplers, when the lists were drawn."""
    draws: Draws
    base_seed: int
    epoch: int | None
    peeked: PeekedEpoch

    def holds(self, loader: DataLoader[Any]) -> bool:
        """Return whether the epoch that begins now has these lists, where the random states are the same."""
        present = epoch_of(loader), lengths(loader), settings(loader)
        return present == (self.epoch, self.lengths, self.settings) and self.peeked.holds()

    def begin(self, loader: DataLoader[Any]) -> None:
        """Begin the epoch: the random states are where its first list is going to be drawn."""
        restore_own(loader, self.began[1:])
        _advance(self.base_draws)
        self.peeked.begin()

    def start(self, loader: DataLoader[Any]) -> bool:
        """Have the lists that were drawn count; return False if the loop drew something since the epoch began."""
        if not same(capture(loader), self.began):
            return self.draws.begin_apart(self.began)
        self.draws.begin()
        return True


class Guesses:
    """What a sampler's next epoch is guessed from, and whether that is worth while.

    Attributes:
        step: by how much the sampler's epoch is expected to move on.
        failed: epochs that were begun ahead in vain.
    """

    def __init__(self) -> None:
        self.step, self.failed, self._wrong = 1, 0, 0
        self._begun_at: int | None = None

    def epoch_begins(self, epoch: int | None, *, at_an_end: bool = True) -> None:
        """Learn how the sampler's epoch moves; after an early break some samplers stay where they are."""
        if at_an_end and epoch is not None and self._begun_at is not None:
            self.step = epoch - self._begun_at
        self._begun_at = epoch

    def was_right(self) -> None:
        """Count an epoch that was the guessed one."""
        self._wrong = 0

    def was_wrong(self, *, can_learn: bool) -> None:
        """Count one that was not; a loop that draws random numbers before it will do so again, and can't be learnt."""
        self.failed += 1
        self._wrong += 1 if can_learn else _MOST_WRONG

    @property
    def are_worth_it(self) -> bool:
        """Whether the next epoch is to be guessed."""
        return self._wrong < _MOST_WRONG


def ordering(loader: DataLoader[Any]) -> Any:
    """Return the sampler that gives the order: the one inside a plain `BatchSampler`, else what yields the batches."""
    outer: Any = loader._index_sampler
    return outer.sampler if type(outer) is BatchSampler else outer


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    own = [loader.generator, getattr(ordering(loader), "generator", None)]
    distinct: list[torch.Generator] = []
    for generator in own:
        if isinstance(generator, torch.Generator) and all(generator is not other for other in distinct):
            distinct.append(generator)
    return distinct


def capture(loader: DataLoader[Any]) -> States:
    """Return the random states that a loader may draw from: torch's own, and those of its generators."""
    return [torch.get_rng_state(), *(generator.get_state() for generator in _generators(loader))]


def restore_own(loader: DataLoader[Any], state: States) -> None:
    """Set the loader's own generators, not torch's."""
    for generator, saved in zip(_generators(loader), state, strict=True):
        generator.set_state(saved)


def _advance(draws: int) -> None:
    """Have torch's own generator make so many draws: nobody else's are lost by that, as they were by writing it."""
    for _ in range(draws):
        _draw(None)


def lengths(loader: DataLoader[Any]) -> tuple[int, ...]:
    """Return what torch's samplers take as the length of the dataset now, and that of the dataset itself."""
    sampler: Any = ordering(loader)
    sources = [loader.dataset, sampler.data_source if type(sampler) in (RandomSampler, SequentialSampler) else ()]
    return tuple(len(source) for source in sources)  # type: ignore[arg-type]


def settings(loader: DataLoader[Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Return the samplers of torch's, with what the loop may set in them between two epochs, as the batch size."""
    kinds = (BatchSampler, RandomSampler, SequentialSampler, DistributedSampler)
    samplers = [each for each in (loader._index_sampler, ordering(loader)) if type(each) in kinds]
    return [(each, {n: v for n, v in vars(each).items() if type(v) in _PLAIN and n != "epoch"}) for each in samplers]


def epoch_of(loader: DataLoader[Any]) -> int | None:
    """Return the sampler's epoch, or None if it counts none."""
    epoch = getattr(ordering(loader), "epoch", None)
    return epoch if type(epoch) is int else None


def set_epoch(loader: DataLoader[Any], epoch: int | None) -> None:
    """Set the epoch that the sampler counts, if it counts any."""
    if epoch is not None and epoch_of(loader) is not None:
        ordering(loader).epoch = epoch


def can_draw_ahead(loader: DataLoader[Any]) -> bool:
    """Return whether the loader's next epoch can be drawn ahead: its sampler's draws are known, or it can peek."""
    sampler = ordering(loader)
    if can_peek(loader):
        return epoch_of(loader) is not None
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler) in (SequentialSampler, DistributedSampler)


def can_peek(loader: DataLoader[Any]) -> bool:
    """Return whether the sampler can tell its next epoch, see `accel.dataio.peek`."""
    return hasattr(loader._index_sampler, "peek_epoch")


def persistent(loader: DataLoader[Any]) -> bool:
    """Return whether a loader keeps its workers from epoch to epoch, and with them their base seed."""
    return loader.num_workers > 0 and loader.persistent_workers


def base_seed(loader: DataLoader[Any]) -> int:
    """Draw the base seed of the workers, as a `DataLoader` does when an epoch begins."""
    return _draw(loader.generator)


def _draw(generator: torch.Generator | None) -> int:
    """Draw as a `DataLoader` draws a base seed, and a `RandomSampler` its own seed."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def begin(loader: DataLoader[Any], *, seeded: int | None = None) -> tuple[Iterator[Any], int]:
    """Begin an epoch as the plain loader would: return its index lists and the base seed.

    Args:
        loader: map-style loader.
        seeded: the base seed, if it is not to be drawn: persistent workers keep theirs.
    """
    if seeded is not None:
        return iter(loader._index_sampler), seeded
    # A batch sampler may draw here. Where there are workers, torch asks for a second iterator and drops the first.
    lists, seed = iter(loader._index_sampler), base_seed(loader)
    return (iter(loader._index_sampler) if loader.num_workers else lists), seed


def draw_ahead(loader: DataLoader[Any], *, step: int = 1, seeded: int | None = None) -> Ahead | None:
    """Draw the next epoch's index lists under a copy of the random state; None if they can't be known or are none.

    Args:
        loader: map-style loader.
        step: by how much the sampler's epoch is expected to move on.
        seeded: see `begin`.
    """
    if not can_draw_ahead(loader):
        return None
    before, epoch = capture(loader), epoch_of(loader)
    following = None if epoch is None else epoch + step
    apart = torch.Generator()
    apart.set_state(before[0])
    base_draws = int(seeded is None and loader.generator is None)
    try:
        if seeded is None:
            seeded = _draw(apart if loader.generator is None else loader.generator)
        if can_peek(loader):
            peeked = loader._index_sampler.peek_epoch(following)
        else:
            set_epoch(loader, following)
        began, global_draws = [apart.get_state(), *capture(loader)[1:]], 0
        if not can_peek(loader):
            sampler, global_draws = _seeded(loader, apart)
            peeked = PeekedEpoch(iter(sampler))
        first = None if peeked is None else next(peeked.lists, None)
        after = [apart.get_state(), *capture(loader)[1:]]
    finally:
        restore_own(loader, before[1:])
        set_epoch(loader, epoch)
    if can_peek(loader) and not torch.equal(torch.get_rng_state(), before[0]):
        torch.set_rng_state(before[0])
        return None  # a sampler that peeks and draws from torch's own generator
    if peeked is None or first is None:
        return None
    draws = Draws(loader, itertools.chain([first], peeked.lists), after, global_draws)
    return Ahead(before, began, base_draws, lengths(loader), settings(loader), draws, seeded, following, peeked)


def _seeded(loader: DataLoader[Any], apart: torch.Generator) -> tuple[Any, int]:
    """Return what yields the index lists, its seed drawn from `apart` and not from torch's own; and how many draws."""
    outer, sampler = loader._index_sampler, ordering(loader)
    if type(sampler) is not RandomSampler or sampler.generator is not None:
        return outer, 0
    seeded = copy.copy(sampler)
    seeded.generator = torch.Generator().manual_seed(_draw(apart))
    if outer is sampler:
        return seeded, 1
    outer = copy.copy(outer)
    outer.sampler = seeded
    return outer, 1


def same_draws(loader: DataLoader[Any], ahead: Ahead) -> bool:
    """Return whether the random states are those under which `ahead` was drawn."""
    return same(capture(loader), ahead.before)


def same(states: States, other: States) -> bool:
    """Return whether two lists of random states are equal."""
    return len(states) == len(other) and all(torch.equal(a, b) for a, b in zip(states, other, strict=True))
