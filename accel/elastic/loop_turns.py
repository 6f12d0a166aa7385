"""How often a loop has been through what it calls an epoch: with a `break`, that may be a part of the data.

    for epoch in remaining_epochs(loader, 90):          a turn
        for step, batch in enumerate(loader):           a pass, which goes on where the one before was left
            if step == 500: break

A turn is over when the loop asks `remaining_epochs` for the next one; in a state that is saved before that, once its
pass was left.
"""

from __future__ import annotations

import weakref

from accel.dataio.elastic_sampler import ElasticSampler


class LoopTurns:
    """Keep `sampler.turns`, while a loop goes through `remaining_epochs`; it is None in others.

    Args:
        sampler: of the loader.
    """

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = weakref.ref(sampler)  # which this belongs to
        self._is_going_on = self._has_trained = False
        """In the loop."""
        self._is_trained_in = self._is_counted = False
        """The present turn: in one of its passes, and in `sampler.turns`."""

    def begin(self, number: int) -> None:
        """The loop begins a turn.

        Args:
            number: of those before it.
        """
        self._is_going_on = True
        self._is_trained_in = self._is_counted = False
        self._set(number)

    def finish(self, number: int) -> None:
        """The loop has been through all turns, or somebody has made a list of them.

        Args:
            number: of the turns.
        """
        self._set(number if self._has_trained else None)
        self._is_going_on = self._has_trained = False

    def trained(self) -> None:
        """A batch was trained on."""
        if self._is_going_on:
            self._is_trained_in = self._has_trained = True
        else:
            self._set(None)

    def pass_begins(self) -> None:
        """The loop goes on with the turn, as far as is known."""
        if self._is_counted:
            self._count(-1)

    def pass_is_over(self) -> None:
        """The loop's pass has ended, or was left."""
        if self._is_going_on and self._is_trained_in and not self._is_counted:
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
