"""Counts what a loop trains on of an elastic loader, so that its position in the epoch is known at any time.

One rule: a batch counts when its backward pass has run and an optimizer has stepped; a pass over the loader in which
nothing is trained counts nothing.

    delivered ──backward pass──▶ trained ──update──▶ counted        a new pass, or a resumed run, begins behind it

The order of an epoch is fixed, so that each batch of any pass has its place in it, and to count one means that the
epoch is consumed up to its end. A look at some batches or an evaluation within an epoch takes nothing from it, and a
pass that is left by a `break` is continued by the next one. A loop that fetches batches ahead of the one that it trains
on is known by its first two steps: from then on those that it holds are left out. What it still holds when a pass has
ended is counted as it is trained on, and the epoch ends with the last of it.

It follows the loader for good: also after `accel.undo` each epoch must have each sample once.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from accel.dataio.elastic_sampler import ElasticSampler, LoopTurns
from accel.dataio.passes.proxy import LoaderProxy, PassesUnderWay
from accel.dataio.sampling.ledger import DealtStep, SamplerPlace
from accel.elastic.left_alone import is_left_alone
from accel.errors import InvalidArgument
from accel.profiler.loop import backward
from accel.profiler.loop.observers import LoopObserver
from accel.profiler.loop.update_hooks import UPDATES

MOST_HELD = 9
"""Batches that a loop may fetch ahead of the one that it trains on, and that can be left out of what is counted."""


class _Pass:
    """One pass over the loader, whose steps are `dealt` in the sampler's ledger."""

    def __init__(self, dealt: deque[DealtStep]) -> None:
        self.dealt = dealt
        self.delivered: deque[DealtStep] = deque()
        self.batches = self.trained = self.held_at_first = 0
        """Batches, backward passes, and how many batches were held in the first of these."""


class SamplePosition(LoopObserver):
    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__()
        self.sampler, self._ledger = sampler, sampler.ledger
        self._passes: WeakKeyDictionary[Any, _Pass] = WeakKeyDictionary()
        self._iterator: weakref.ref[Any] | None = None
        self._pass: _Pass | None = None
        """The pass whose batch was delivered last, and the loop's iterator over it."""
        self._underway = PassesUnderWay()
        self._fresh: list[_Pass] = []
        """Passes of which a batch was delivered since the last backward pass: that trains on it."""
        self._ahead = 0
        """Batches that the loop holds while it trains on one before them."""
        self._ending: _Pass | None = None
        """The pass that has no more batches, while the loop holds some of them."""
        self._left = 0
        self._empty_at: SamplerPlace | None = None
        """The end of an epoch, where a pass without a batch has begun."""
        self._is_uncounted = False
        """`ledger.trained` waits for an update."""
        UPDATES.add_weakly(self.updated)

    # -- the loader (observers.LoopObserver) ---------------------------------------------------------------------------

    def epoch_begins(self, proxy: LoaderProxy) -> None:
        """Let the pass begin behind what the loop has trained on; an evaluation within an epoch has all samples."""
        self._note(proxy)
        outer = proxy._accel_fetching.underway.oldest
        if self._ending is not None and self._ending.trained:
            self._finish(self._ending)
        elif self._is_uncounted and outer is None:
            self._count()  # the loop has left its pass before an update
        self._ending = None
        sampler, ledger = self.sampler, self._ledger
        if ledger.deals.steps_after(ledger.place) == 0:
            # The pass before was left after its last batch. The first one of a run that is resumed there has no batch:
            # it is over, and the loop has counted it.
            if ledger.place in (self._empty_at, None if ledger.trained is None else ledger.trained.place):
                sampler.set_epoch(sampler.epoch + 1)
                sampler.turns.end_pass()
            self._empty_at = ledger.place
        if outer is not None and not torch.is_grad_enabled():
            ledger.next_begins_at = ledger.place._replace(position=0, taken_before=ledger.place.taken)

    def begin_again(self, one: Any) -> None:
        """The batches of a pass are made anew, from where the sampler was put meanwhile: on other ranks, say."""
        self._passes[one] = self._pass = _Pass(self._ledger.begun_last)
        self._iterator = weakref.ref(one, self._freed)
        self._fresh, self._is_uncounted = [], False

    def batch_delivered(self, batch: Any, proxy: LoaderProxy) -> None:
        """Note the batch, unless the loop only looks at it."""
        self._underway = underway = proxy._accel_fetching.underway
        one = underway.only
        if one is None or self._iterator is None or self._iterator() is not one:
            self._note(proxy)
            one = underway.current
            if one is not underway.oldest and not torch.is_grad_enabled():
                return  # an evaluation within another pass
            self._iterator, self._pass = weakref.ref(one, self._freed), self._passes.get(one)
        current = self._pass
        if current is None or not current.dealt:
            return  # of a pass that had begun before this followed the loader
        current.delivered.append(self._ledger.deliver(current.dealt))
        current.batches += 1
        if current not in self._fresh:
            self._fresh.append(current)
        backward.listen(self)  # anew with each batch: others may have put torch's own function back

    def epoch_ended(self, proxy: LoaderProxy) -> None:
        """Go on to the next epoch once the loop has trained on what it holds, if it has trained in the pass."""
        current, outer = proxy._accel_fetching.underway.current, proxy._accel_fetching.underway.oldest
        ended = self._passes.get(current)
        if ended is None or not ended.delivered:
            return
        self._fresh = [each for each in self._fresh if each is not ended]
        if ended.trained:
            self._ending, self._left = ended, min(self._ahead, len(ended.delivered) - 1)
            if not self._left:
                self._finish(ended)
        elif current is outer and torch.is_grad_enabled():
            # Nothing was trained in it: it was for a look, unless the loop trains on its batches before the next one.
            self._ending, self._left = ended, len(ended.delivered)

    # -- training (backward listener, update listener) -----------------------------------------------------------------

    def backward_begins(self, roots: list[Tensor]) -> None:
        if self._ending is not None:
            if not self._left:
                return  # a further pass of its last batch
            self._left -= 1
            self._ending.trained += 1
            self._train(self._ending, self._left)
        elif self._fresh:
            for each in self._fresh:  # in all but odd loops it is one
                each.trained += 1
            current = self._fresh[-1]
            self._fresh = []
            self._see_what_is_held(current)
            self._train(current, min(self._ahead, len(current.delivered) - 1))

    def updated(self) -> None:
        """Count what was trained on; the gradients may have come without a backward pass that was heard of."""
        if self._fresh and not self._fresh[-1].trained:
            self.backward_begins([])
        if self._is_uncounted:
            self._count()

    def _train(self, one: _Pass, held: int) -> None:
        self._ledger.trained, self._is_uncounted = one.delivered[-1 - held], True
        self.sampler.turns.train()
        if self._iterator is not None and self._iterator() is None and self._underway.oldest is None:
            self.sampler.turns.end_pass()  # the loop has left the pass, and trains on what it holds of it
            backward.forget(self)

    def _see_what_is_held(self, one: _Pass) -> None:
        """Learn from the first two batches that are trained on in a pass how many the loop holds then.

        A loop that takes two batches for a step has one more each time, and holds none.
        """
        if one.trained > 2:
            return
        held = one.batches - one.trained
        if one.trained == 1:
            one.held_at_first, one.delivered = held, deque(one.delivered, MOST_HELD + 1)
        else:
            self._ahead = held if held == one.held_at_first and held < MOST_HELD else 0
            self._ledger.holds_batches = self._ahead > 0

    # -- counting ------------------------------------------------------------------------------------------------------

    def _count(self) -> None:
        assert self._ledger.trained is not None
        self.sampler.count(self._ledger.trained.place)
        self._is_uncounted = False
        if self._ending is not None and self._left == 0:
            self._finish(self._ending)

    def _finish(self, one: _Pass) -> None:
        """The epoch is over: gradients that are left at its end come to nothing in most loops."""
        self._ending, self._left, self._is_uncounted = None, 0, False
        end = one.delivered[-1].place
        if self.sampler.epoch == end.epoch:
            self.sampler.count(end)
            self.sampler.set_epoch(end.epoch + 1)
        if not self._fresh:
            backward.forget(self)
        self.sampler.turns.end_pass()

    def _freed(self, one: weakref.ref[Any]) -> None:
        """The loop has left a pass, or come to its end."""
        if one is self._iterator and self._pass is not None and self._underway.oldest is None:
            if self._ending is not None and self._ending.trained:
                self._finish(self._ending)
            elif self._pass.trained:
                self.sampler.turns.end_pass()
                if not self._fresh:
                    backward.forget(self)

    def _note(self, proxy: LoaderProxy) -> None:
        """Note the sampler's name for the pass begun last: nothing else has begun since then."""
        self._ledger.next_begins_at = None
        newest = proxy._accel_fetching.underway.newest
        if newest is not None and newest not in self._passes:
            self._passes[newest] = _Pass(self._ledger.begun_last)


# -- epochs ------------------------------------------------------------------------------------------------------------


class RemainingEpochs(Sequence[int]):
    """Numbers of epochs, as a range of them; going through them tells the loader which are over.

    An epoch may be a part of the data there:

        for epoch in remaining_epochs(loader, 90):          a turn
            for step, batch in enumerate(loader):           a pass, which continues the one before
                if step == 500: break

    A turn is over when the loop asks for the next one; in a state that is saved before that, once its pass has ended or
    was left. In other loops `sampler.turns.over` is None.
    """

    def __init__(self, turns: LoopTurns, numbers: range) -> None:
        self._turns, self._numbers = turns, numbers

    def __iter__(self) -> Iterator[int]:
        self._turns.is_trained = False
        try:
            for number in self._numbers:
                self._turns.begin(number)
                yield number
            self._turns.begin(self._numbers.stop)
        finally:  # also where the loop is left
            self._turns.present = None

    def __getitem__(self, index: Any) -> Any:
        return self._numbers[index]

    def __len__(self) -> int:
        return len(self._numbers)

    def __repr__(self) -> str:
        return repr(self._numbers)


def remaining_epochs(loader: Any, total: int) -> Sequence[int]:
    """Return the epochs that a training has still to take, the one that it is in the midst of included.

    Loop over what this returns: where the loop leaves its passes early, by a `break`, an epoch is one turn of it.

    Args:
        loader: that `accel.optimize` returned under `elastic=`; of one that it returned as it
            was, since accel is switched off, these are all epochs.
        total: epochs of the whole training.

    Raises:
        InvalidArgument: if it is another loader.

    Example:
        >>> elastic = accel.Elastic(checkpoint="runs/one")
        >>> model, loader, optimizer = accel.optimize(model, loader, optimizer, elastic=elastic)
        >>> for epoch in remaining_epochs(loader, 10):
        ...     for batch, target in loader:
        ...         ...
    """
    if is_left_alone(loader):
        return range(total)
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, ElasticSampler):
        raise InvalidArgument(
            "loader must be the one that accel.optimize returned under elastic=, got "
            f"{type(loader).__name__} without an ElasticSampler"
        )
    turns = sampler.turns
    first = sampler.epoch if turns.over is None else turns.over
    turns.total, turns.to_come = total, max(total - first, 0)
    return RemainingEpochs(turns, range(first, max(total, first)))
