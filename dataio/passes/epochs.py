"""The index lists of an epoch: drawn early, and seen to be the right ones.

The next epoch is drawn by copies of samplers and generators, in the order in which a `DataLoader`
draws: the workers' base seed first, then the sampler at its first index. `RandomSampler` draws once
more when it is exhausted. When the loop does begin the epoch, the random states are compared with
those that were copied. If they are equal, the lists are exactly what the plain loader would have
drawn, and the states are advanced as they would have been, by the same draws.
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


class AheadLists:
    """Yields the index lists of an epoch that has not begun; at its end draws what the loader's sampler would draw."""

    def __init__(self, loader: DataLoader[Any], lists: Iterator[Any]) -> None:
        self._loader, self._lists = loader, lists
        self._counts = self._is_over = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._lists)
        except StopIteration:
            was_over, self._is_over = self._is_over, True
            if self._counts and not was_over:
                draw_at_end(self._loader)
            raise

    def begin(self) -> None:
        """The epoch has begun."""
        self._counts = True
        if self._is_over:
            draw_at_end(self._loader)


@dataclass
class Ahead:
    """The next epoch's index lists, drawn ahead, with what must still hold when it begins.

    Attributes:
        before, began, after: random states at which it is drawn, once it has begun, and once its first list is drawn.
        draws: numbers that the base seed and the first list need of torch's own generator.
        lengths, settings: of dataset and samplers, when the lists were drawn.
    """

    before: States
    began: States
    after: States
    draws: tuple[int, int]
    lengths: tuple[int, ...]
    settings: list[tuple[Any, dict[str, Any]]]
    lists: Iterator[Any]
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
        _advance(self.draws[0])
        self.peeked.begin()

    def start(self, loader: DataLoader[Any]) -> bool:
        """Have the lists that were drawn count; return False if they hang on what the loop has drawn since."""
        if same(capture(loader), self.began):
            restore_own(loader, self.after[1:])
            _advance(self.draws[1])
        elif not same(self.began, self.after):
            return False
        return True


class Guesses:
    """What a sampler's next epoch is guessed from, and whether that is worth while.

    `step` is by how much the sampler's epoch is expected to move on, `failed` counts epochs begun
    ahead in vain.
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
        self._wrong = 0

    def was_wrong(self, *, can_learn: bool) -> None:
        """Count one that was not; a loop that draws random numbers before it will do so again, and can't be learnt."""
        self.failed += 1
        self._wrong += 1 if can_learn else _MOST_WRONG

    @property
    def are_worth_it(self) -> bool:
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

    `seeded` is the base seed, if it is not to be drawn: persistent workers keep theirs.
    """
    if seeded is not None:
        return iter(loader._index_sampler), seeded
    # A batch sampler may draw here. Where there are workers, torch asks for a second iterator and drops the first.
    lists, seed = iter(loader._index_sampler), base_seed(loader)
    return (iter(loader._index_sampler) if loader.num_workers else lists), seed


def draw_ahead(
    loader: DataLoader[Any], *, step: int = 1, seeded: int | None = None, ended: bool = True
) -> Ahead | None:
    """Draw the next epoch's index lists under a copy of the random state; None if they can't be known or are none.

    Args:
        loader: map-style loader.
        step: by how much the sampler's epoch is expected to move on.
        seeded: see `begin`.
        ended: the running epoch's sampler has drawn what it draws at its end.
    """
    if not can_draw_ahead(loader):
        return None
    states, epoch, sampler = capture(loader), epoch_of(loader), ordering(loader)
    copies = {id(own): _copy(state) for own, state in zip([None, *_generators(loader)], states, strict=True)}
    following = None if epoch is None else epoch + step
    if not ended and draws_at_end(loader):
        torch.randperm(len(sampler.data_source), generator=copies[id(sampler.generator)])
    before = [each.get_state() for each in copies.values()]
    base_draws = int(seeded is None and loader.generator is None)
    if seeded is None:
        seeded = _draw(copies[id(loader.generator)])
    began = [each.get_state() for each in copies.values()]
    peeked: PeekedEpoch | None
    if can_peek(loader):
        peeked = loader._index_sampler.peek_epoch(following)
    else:
        peeked = PeekedEpoch(_lists_of_copy(loader, following, copies))
    first = None if peeked is None else next(peeked.lists, None)
    if can_peek(loader) and not same(capture(loader), states):  # it has drawn
        restore_own(loader, states[1:])
        torch.set_rng_state(states[0])
        return None
    if peeked is None or first is None:
        return None
    after = [each.get_state() for each in copies.values()]
    draws = base_draws, int(not torch.equal(after[0], began[0]))
    lists = itertools.chain([first], peeked.lists)
    return Ahead(before, began, after, draws, lengths(loader), settings(loader), lists, seeded, following, peeked)


def _copy(state: torch.Tensor) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(state)
    return generator


def _lists_of_copy(loader: DataLoader[Any], epoch: int | None, copies: dict[int, torch.Generator]) -> Iterator[Any]:
    """Return the index lists of an epoch, from a copy of the samplers that draws from copies of the generators."""
    sampler = copy.copy(ordering(loader))
    if type(sampler) is RandomSampler and sampler.generator is None:
        sampler.generator = torch.Generator().manual_seed(_draw(copies[id(None)]))
    elif type(sampler) is RandomSampler:
        sampler.generator = copies[id(sampler.generator)]
    elif type(sampler) is DistributedSampler and epoch is not None:
        sampler.epoch = epoch
    outer: Any = loader._index_sampler
    if outer is ordering(loader):
        return iter(sampler)
    outer = copy.copy(outer)
    outer.sampler = sampler
    return iter(outer)


def draws_at_end(loader: DataLoader[Any]) -> bool:
    """Return whether the sampler draws from a generator of the loader's own once all its indices are read."""
    sampler: Any = ordering(loader)
    if type(sampler) is not RandomSampler or sampler.generator is None or sampler.replacement:
        return False
    return sampler.num_samples == len(sampler.data_source)


def draw_at_end(loader: DataLoader[Any]) -> None:
    """Draw what the sampler draws once all its indices are read."""
    if draws_at_end(loader):
        sampler = ordering(loader)
        torch.randperm(len(sampler.data_source), generator=sampler.generator)


def same_draws(loader: DataLoader[Any], ahead: Ahead) -> bool:
    return same(capture(loader), ahead.before)


def same(states: States, other: States) -> bool:
    return len(states) == len(other) and all(torch.equal(a, b) for a, b in zip(states, other, strict=True))
