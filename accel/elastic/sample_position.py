"""Counts what a loop takes of an elastic loader, so that its position in the epoch is known at any time.

It follows the loader for good: also after `accel.undo` each epoch must have each sample once. What the loop only looks
at does not count, since it would be missing in the epoch's training:

    a pass begun within another one, such as `next(iter(loader))` for a picture     until an optimizer steps in it
    a pass without gradients, such as an evaluation of the training samples         unless an optimizer steps in it
    any other that is left early, such as `next(iter(loader))` between two epochs   unless a backward pass is made in it

A pass that is trained in and left, by a `break`, is gone on with by the next one. Batches that the loop holds then and
has not trained on come again there; at any time they are left out of what is saved, and so are those whose backward
pass no update has followed. A loop may still hold the iterator that it has left: whether a pass that begins meanwhile
goes on with the epoch, or is a look within the other one, is seen by which of the two is trained on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from accel.dataio.elastic_sampler import ElasticSampler
from accel.dataio.passes.proxy import LoaderProxy
from accel.dataio.passes.underway import PassesUnderWay
from accel.dataio.sampling.places import SamplerPlace
from accel.elastic.held_batches import HeldBatches
from accel.elastic.left_alone import is_left_alone
from accel.elastic.loop_turns import RemainingEpochs, turns_of
from accel.elastic.updates import all_updates
from accel.profiler.loop import backward
from accel.profiler.loop.observers import LoopObserver


class _Look(NamedTuple):
    """Batches that may only be looked at: where the loop was before them, and how many updates there had been."""

    place: SamplerPlace
    updates: int
    has_gradients: bool


class _Apart(NamedTuple):
    """A pass begun while the loop held another one: where that was, and where this one's batches begin."""

    at: SamplerPlace
    start: SamplerPlace


class _Inner:
    """Batches in a row of a pass within another one, which the loop may train on if it has left the other.

    Args:
        dealt: the pass, as the sampler calls it.
        updates: before the first batch.
        ahead: batches that the loop holds, by the passes before.
    """

    def __init__(self, dealt: Any, updates: int, ahead: int) -> None:
        self.dealt, self.updates, self.has_gradients = dealt, updates, torch.is_grad_enabled()
        self.batches, self.ahead = 0, HeldBatches(ahead)

    def is_of(self, dealt: Mapping[Any, Any], one: Any) -> bool:
        """Return whether it is this pass that the sampler has dealt so."""
        return one in dealt and dealt[one] is self.dealt

    def delivered(self) -> None:
        """Count a batch."""
        self.batches += 1
        self.ahead.delivered(self.dealt)


class SamplePosition(LoopObserver):
    """Follow a loader that an `ElasticSampler` makes the batches of.

    Args:
        sampler: of the loader.
        updates: returns how many steps optimizers have taken; None counts those of all optimizers.
    """

    def __init__(self, sampler: ElasticSampler, updates: Callable[[], int] | None = None) -> None:
        super().__init__()
        self.sampler = sampler
        # Asked for several times a batch: without a line of Python for each.
        self._updates = partial(attrgetter("count"), all_updates()) if updates is None else updates
        self._dealt: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        """What the sampler calls each pass."""
        self._began: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Updates when each pass had begun."""
        self._begins_apart: _Apart | None = None
        """The pass that begins now, until it is known by name."""
        self._apart: WeakKeyDictionary[Any, _Apart] = WeakKeyDictionary()
        self._underway = PassesUnderWay()
        """Of the loader."""
        self._inner: _Inner | None = None
        self._look: _Look | None = None
        self._has_gone_backward = False
        """Since the look began."""
        self._is_heard = False
        """The loop makes backward passes that are heard of: a batch without one is not trained on."""
        self._is_waiting = False
        """The batch counted last has not been trained on, as far as is known."""
        self._is_ending = False
        """The pass has no more batches, but the loop holds some that it has not trained on."""
        self._updates_before = self._updates_at_first = self._updates()
        """That batch, and all; from now on they are counted."""
        self._last: weakref.ref[Any] | None = None
        """The pass that it is of."""
        self._last_dealt: Any = None
        """What the sampler calls that one."""
        self._heeds_backward = False
        """Whether the next backward pass says something: the first one after a batch does."""
        self._ahead, self._turns = HeldBatches(), turns_of(sampler)
        if updates is None:
            all_updates().listen(self)

    def epoch_begins(self, proxy: LoaderProxy) -> None:
        """Let the pass begin where the loop is to go on: so that the next one has what was only looked at, too."""
        self._note(proxy)
        self._notice_update()
        if self._is_ending:
            self._finish()
        outer = self._underway.oldest
        if outer is not None:
            self._begin_apart(outer)
        elif self._look is not None:
            self._move(self._next_place())

    def _begin_apart(self, outer: Any) -> None:
        """Let a pass begin while another one is held: the loop has left that one, or only looks at this one."""
        is_trained_in = self._began.get(outer, self._updates()) != self._updates()
        place, start = self.sampler.place, self._next_place()
        if start == place.at_epoch(place.epoch + 1) and (is_trained_in or self._look is None):
            # Nothing is left of the other one, and the loop may never ask for its end.
            self._move(start)
            self._turns.pass_is_over()
        elif is_trained_in and not torch.is_grad_enabled():
            start = place.at_epoch(place.epoch)  # an evaluation has all samples
        self._begins_apart = _Apart(self.sampler.place, start)
        self.sampler.begin_elsewhere(start)

    def begin_again(self, one: Any) -> None:
        """The batches of a pass are made anew, from where the sampler was put meanwhile: on other ranks, say."""
        self._dealt[one] = self._last_dealt = self.sampler.begun_last
        self._last, self._look, self._inner = weakref.ref(one, self._freed), None, None
        self._ahead, self._is_waiting, self._updates_before = HeldBatches(), False, self._updates()

    def batch_requested(self) -> None:
        """Notice what was trained on since the last batch: before anything is saved."""
        if self._is_waiting:
            self._notice_update()
        inner, current = self._inner, self._underway.current
        if inner is not None and inner.is_of(self._dealt, current) and self._updates() != inner.updates:
            self._take_over(current, inner)
        elif (self._last is None or self._last() is not current) and current is self._underway.oldest:
            self._turns.pass_begins()

    def batch_delivered(self, batch: Any, proxy: LoaderProxy) -> None:
        """Count the batch as consumed, if it is one that the loop trains on."""
        only = proxy._accel_fetching.underway.only
        if only is not None and self._last is not None and self._last() is only and self._begins_apart is None:
            self._underway, self._inner = proxy._accel_fetching.underway, None
            self._count(only)  # another batch of a pass that is known
            return
        self._note(proxy)
        current, outer = self._underway.current, self._underway.oldest
        if outer is current or outer not in self._dealt:
            self._inner = None
            if len(self._apart):
                self._settle(current)
            self._count(current)
            return
        dealt = self._dealt[current]
        if self._inner is None or not self._inner.is_of(self._dealt, current):
            self._inner = _Inner(dealt, self._updates(), self._ahead.batches)
        self._inner.delivered()
        self.sampler.go_on_with(self._dealt[outer])
        self._heed_backward()

    def epoch_ended(self, proxy: LoaderProxy) -> None:
        """Go on to the next epoch, once the loop has trained on what it holds."""
        self._note(proxy)
        if self._underway.current is not self._underway.oldest:
            return
        self.sampler.unfinished = None  # gradients that are left at an epoch's end come to nothing in most loops
        if self._look is not None and self._look.has_gradients:
            self._look = None  # a whole pass with gradients is an epoch, whatever the loop makes of it
        if self._go_back():
            return
        if self.sampler.held and self._last is not None and self._last() is self._underway.current:
            self._is_ending = True
            self._heed_backward()
        else:
            self._finish()

    # -- the backward pass (backward.BeginListener) --------------------------------------------------------------------

    def backward_begins(self, roots: list[Tensor]) -> None:
        """Note that what was looked at is trained on: also in a step that is left out, or not ended."""
        if not self._heeds_backward:
            return
        if self.sampler.unfinished is None and self._updates() != self._updates_at_first:
            self.sampler.unfinished = self.sampler.epoch, self.sampler.position_before(self.sampler.held)
        self._has_gone_backward = self._is_heard = True
        self._ahead.trained()
        if self._inner is not None:
            self._inner.ahead.trained()
        self._trained()
        self._heeds_backward = self._is_ending
        if not self._is_ending and self._last is not None and self._last() is None:
            backward.forget(self)  # the loop has left the pass, and trains on what it holds of it

    # -- updates (updates.UpdateListener) ------------------------------------------------------------------------------

    def updated(self) -> None:
        """What went backward before is in the weights."""
        self.sampler.unfinished = None
        if self._is_ending and not self.sampler.held:
            self._finish()

    def _notice_update(self) -> None:
        """Notice an update whose gradients came without a backward pass that was heard of."""
        if self._is_waiting and self._updates() != self._updates_before:
            self._trained()

    # -- counting ------------------------------------------------------------------------------------------------------

    def _count(self, one: Any) -> None:
        if self._is_ending:
            self._finish()
        has_gradients = torch.is_grad_enabled()
        if self._look is None or self._look.has_gradients != has_gradients:
            self._look = _Look(self.sampler.place, self._updates(), has_gradients)
            self._has_gone_backward = False
        if self._last is None or self._last() is not one:
            self._last, self._last_dealt = weakref.ref(one, self._freed), self._dealt[one]
        dealt = self._last_dealt
        if self.sampler.running_pass is not dealt:
            self.sampler.go_on_with(dealt)
        self.sampler.advance()
        self._ahead.delivered(dealt)
        self._is_waiting, self._updates_before = True, self._updates()
        self.sampler.held = self._ahead.batches + self._is_heard
        self._heeds_backward = True
        backward.listen(self)

    def _heed_backward(self) -> None:
        self._heeds_backward = True
        backward.listen(self)  # anew with each batch: others may have put torch's own function back

    def _trained(self) -> None:
        """The batch counted last is trained on, or that before those which the loop fetches ahead."""
        self._is_waiting = False
        self.sampler.held = max(0, self.sampler.held - 1) if self._is_ending else self._ahead.batches
        if self._turns.loop is not None or self.sampler.turns is not None:
            self._turns.trained()

    def _finish(self) -> None:
        """The epoch is over, if all of it was taken."""
        self._is_ending = False
        if not self._heeds_backward:  # else the loop holds batches, having asked for the end before it trains on them
            backward.forget(self)
        self.sampler.end_epoch()
        self._turns.pass_is_over()

    # -- passes that are left, or only looked at -----------------------------------------------------------------------

    def _next_place(self) -> SamplerPlace:
        """Return where a pass goes on, where the one before was left; it begins with what was only looked at."""
        sampler = self.sampler
        if self._look is not None and self._is_only_seen(self._look):
            return self._look.place
        place = sampler.place_before(sampler.held)
        is_over = place == sampler.place and sampler.steps_left == 0
        return place.at_epoch(place.epoch + 1) if is_over else place

    def _go_back(self) -> bool:
        """Undo the counting of a pass that nothing was trained in; return whether there was one."""
        look, self._look = self._look, None
        if look is None or not self._is_only_seen(look):
            return False
        self._move(look.place)
        return True

    def _is_only_seen(self, look: _Look) -> bool:
        return self._updates() == look.updates and not (look.has_gradients and self._has_gone_backward)

    def _move(self, place: SamplerPlace) -> None:
        self._look, self._is_waiting = None, False
        if place != self.sampler.place:
            self.sampler.return_to(place)

    def _settle(self, one: Any) -> None:
        """Let the sampler go on where a pass was begun, since the loop has left the other one that it held."""
        apart = self._apart.pop(one, None)
        if apart is not None and apart.at == self.sampler.place:
            self._move(apart.start)

    def _take_over(self, one: Any, inner: _Inner) -> None:
        """Count the batches of a pass in which an optimizer steps: others are held by variables, and were left."""
        while (oldest := self._underway.oldest) is not None and oldest is not one:
            self._underway.leave(oldest)
        self._settle(one)
        place = self.sampler.place
        for _ in range(inner.batches):
            self._count(one)
        self._look = _Look(place, inner.updates, inner.has_gradients)
        self._inner, self._ahead, self._is_waiting = None, inner.ahead, False
        self.sampler.held = self._ahead.untrained if self._is_heard else 0
        self._turns.pass_begins()
        self._turns.trained()

    def _freed(self, one: weakref.ref[Any]) -> None:
        """The loop has left a pass, or come to its end."""
        if one is self._last:
            if self._is_ending:
                self._finish()
            elif not self._heeds_backward:
                backward.forget(self)
            self._turns.pass_is_over()

    def _note(self, proxy: LoaderProxy) -> None:
        """Note what the sampler calls the pass begun last: nothing else has begun since then."""
        self._underway = proxy._accel_fetching.underway
        newest = self._underway.newest
        if newest is not None and newest not in self._dealt:
            self._dealt[newest] = self.sampler.begun_last
            self._began[newest] = self._updates()
            if self._begins_apart is not None:
                self._apart[newest] = self._begins_apart
        if self._begins_apart is not None:
            self.sampler.begin_elsewhere(None)
            self._begins_apart = None


def remaining_epochs(loader: Any, total: int) -> Sequence[int]:
    """Return the epochs that a training has still to take, the one that it is in the midst of included.

    Loop over what this returns: where the loop leaves its passes early, by a `break`, an epoch is one turn of it.

    Args:
        loader: that `accel.optimize` returned under `checkpoint=` or `max_batch_size=`; of one that it returned as it
            was, since accel is switched off, these are all epochs.
        total: epochs of the whole training.

    Raises:
        ValueError: if it is another loader.

    Example:
        >>> model, loader, optimizer = accel.optimize(model, loader, optimizer, checkpoint="runs/one")
        >>> for epoch in remaining_epochs(loader, 10):
        ...     for batch, target in loader:
        ...         ...
    """
    if is_left_alone(loader):
        return range(total)
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, ElasticSampler):
        raise ValueError(
            "loader must be the one that accel.optimize returned under checkpoint= or max_batch_size=, got "
            f"{type(loader).__name__} without an ElasticSampler"
        )
    first = sampler.epoch if sampler.turns is None else sampler.turns
    return RemainingEpochs(sampler, range(first, max(total, first)))
