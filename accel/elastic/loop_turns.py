"""How often a loop has been through what it calls an epoch: with a `break`, that may be a part of the data.

    for epoch in remaining_epochs(loader, 90):          a turn
        for step, batch in enumerate(loader):           a pass, which goes on where the one before was left
            if step == 500: break

A turn is over when the loop asks `remaining_epochs` for the next one; in a state that is saved before that, once its
pass was left.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import overload

from accel.dataio.elastic_sampler import ElasticSampler


class LoopTurns:
    """Keep `sampler.turns`, while a loop goes through `remaining_epochs`; it is None in others.

    Args:
        sampler: of the loader.

    Attributes:
        loop: what goes through turns; None if nothing does.
    """

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = weakref.ref(sampler)  # which this belongs to
        self.loop: object | None = None
        self._before: int | None = None
        """The turns when it began."""
        self._has_trained = False
        """In the loop."""
        self._is_trained_in = self._is_counted = False
        """The present turn: in one of its passes, and in `sampler.turns`."""

    def begin(self, number: int, loop: object) -> None:
        """The loop begins a turn.

        Args:
            number: of those before it.
            loop: what the loop is known by.
        """
        if loop is not self.loop:
            sampler = self._sampler()
            self.loop, self._before, self._has_trained = loop, None if sampler is None else sampler.turns, False
        self._is_trained_in = self._is_counted = False
        self._set(number)

    def finish(self, number: int) -> None:
        """The loop has been through all turns.

        Args:
            number: of the turns.
        """
        self._set(number)

    def leave(self, loop: object) -> None:
        """The loop begins no more turns; one that has not trained, as where somebody makes a list of them, was none."""
        if loop is not self.loop:
            return
        if not self._has_trained:
            self._set(self._before)
        self.loop = None

    def trained(self) -> None:
        """A batch was trained on."""
        if self.loop is None:
            self._set(None)
        else:
            self._is_trained_in = self._has_trained = True

    def pass_begins(self) -> None:
        """The loop goes on with the turn, as far as is known."""
        if self.loop is not None and self._is_counted:
            self._count(-1)

    def pass_is_over(self) -> None:
        """The loop's pass has ended, or was left."""
        if self.loop is not None and self._is_trained_in and not self._is_counted:
            self._count(1)

    def _count(self, turns: int) -> None:
        sampler = self._sampler()
        if sampler is not None and sampler.turns is not None:
            sampler.turns += turns
        self._is_counted = turns > 0

    def _set(self, number: int | None) -> None:
        sampler = self._sampler()
        if sampler is not None:
            sampler.turns = number


_TURNS: weakref.WeakKeyDictionary[ElasticSampler, LoopTurns] = weakref.WeakKeyDictionary()


def turns_of(sampler: ElasticSampler) -> LoopTurns:
    """Return what keeps the turns of the loop that takes a sampler's batches."""
    if sampler not in _TURNS:
        _TURNS[sampler] = LoopTurns(sampler)
    return _TURNS[sampler]


class RemainingEpochs(Sequence[int]):
    """Numbers of epochs, as a range of them; going through them tells the loader which are over.

    Args:
        sampler: of the loader.
        numbers: that are left.
    """

    def __init__(self, sampler: ElasticSampler, numbers: range) -> None:
        self._sampler, self._numbers = sampler, numbers

    def __iter__(self) -> Iterator[int]:
        turns, loop = turns_of(self._sampler), object()
        try:
            for number in self._numbers:
                turns.begin(number, loop)
                yield number
            if self._numbers:
                turns.finish(self._numbers.stop)
        finally:  # also where the loop is left
            turns.leave(loop)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> range: ...
    def __getitem__(self, index: int | slice) -> int | range:
        return self._numbers[index]

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, number: object) -> bool:
        return number in self._numbers

    def __repr__(self) -> str:
        return repr(self._numbers)
