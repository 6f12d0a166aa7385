"""Counts what a loop takes of an elastic loader, so that its position in the epoch is known at any time.

It follows the loader for good: also after `accel.undo` each epoch must have each sample once. What the loop only looks
at does not count, since it would be missing in the epoch's training:

    a pass begun within another one, such as `next(iter(loader))` for a picture     until an optimizer steps in it
    a pass without gradients, such as an evaluation of the training samples         unless an optimizer steps in it
    any other that is left early, such as `next(iter(loader))` between two epochs   unless a backward pass is made in it

A pass that is trained in and left, by a `break`, is gone on with by the next one. Batches that the loop holds then and
has not trained on come again there; at any time they are left out of what is saved.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from accel.dataio.elastic_sampler import ElasticSampler, SamplerPlace
from accel.dataio.passes.proxy import LoaderProxy
from accel.elastic.held_batches import HeldBatches
from accel.elastic.left_alone import is_left_alone
from accel.elastic.loop_turns import turns_of
from accel.run import backward
from accel.session.listeners import Onlooker


class _Updates:
    """Counts the steps of all optimizers of the process."""

    def __init__(self) -> None:
        self.count = 0
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self.count += 1


@functools.cache
def _counter() -> _Updates:
    return _Updates()


def _updates_so_far() -> int:
    return _counter().count


class _Look(NamedTuple):
    """Batches that may only be looked at: where the loop was before them, and how many updates there had been."""

    place: SamplerPlace
    updates: int
    has_gradients: bool


class SamplePosition(Onlooker):
    """Follow a loader that an `ElasticSampler` makes the batches of.

    Args:
        sampler: of the loader.
        updates: returns how many steps optimizers have taken; None counts those of all optimizers.
    """

    def __init__(self, sampler: ElasticSampler, updates: Callable[[], int] | None = None) -> None:
        self.sampler = sampler
        self.counts = True
        """The batch delivered last is one that the loop trains on, as far as is known."""
        self._updates = _updates_so_far if updates is None else updates
        self._dealt: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        """What the sampler calls each pass."""
        self._began: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Updates when each pass had begun."""
        self._inner: tuple[Any, int, int] | None = None
        """A pass within another one, as the sampler calls it: batches looked at, and updates before the first."""
        self._look: _Look | None = None
        self._has_gone_backward = False
        """Since the look began."""
        self._is_heard = False
        """The loop makes backward passes that are heard of: a batch without one is not trained on."""
        self._is_waiting = False
        """The batch counted last has not been trained on, as far as is known."""
        self._updates_before = self._updates()  # that batch; from now on they are counted
        self._last: weakref.ref[Any] | None = None
        """The pass that it is of."""
        self._ahead, self._turns = HeldBatches(), turns_of(sampler)
        super().__init__()

    def epoch_begins(self, proxy: LoaderProxy) -> None:
        """Go back to before a pass that was only looked at, so that the next one has all its samples."""
        self._note(proxy)
        outer = proxy._accel_fetching.underway.oldest
        if outer is None or self._began.get(outer, self._updates()) == self._updates():
            self._leave()  # else the other one is trained on
            self._turns.pass_begins()

    def batch_requested(self) -> None:
        """Notice an update whose gradients came without a backward pass that was heard of."""
        if self._is_waiting and self._updates() != self._updates_before:
            self._trained()

    def batch_delivered(self, batch: Any, proxy: LoaderProxy) -> None:
        """Count the batch as consumed, if it is one that the loop trains on."""
        self._note(proxy)
        underway = proxy._accel_fetching.underway
        dealt, outer = self._dealt[underway.current], underway.oldest
        if outer is underway.current or outer not in self._dealt:
            self._inner = None
            self._count(dealt, underway.current)
            return
        known, batches, updates = self._inner or (dealt, 0, self._updates())
        if known is not dealt:
            batches, updates = 0, self._updates()
        self._inner = dealt, batches + 1, updates
        self.counts = batches > 0 and self._updates() != updates
        if not self.counts:
            self.sampler.go_on_with(self._dealt[outer])
            return
        # An optimizer steps between its batches: the other pass is held by a variable and was left.
        underway.leave(outer)
        self._ahead.leave_out(dealt)
        for _ in range(batches + 1):
            self._count(dealt, underway.current)

    def epoch_ended(self, proxy: LoaderProxy) -> None:
        """Go on to the next epoch."""
        self._note(proxy)
        underway = proxy._accel_fetching.underway
        if underway.current is not underway.oldest:
            return
        if self._look is not None and self._look.has_gradients:
            self._look = None  # a whole pass with gradients is an epoch, whatever the loop makes of it
        if not self._go_back():
            self.sampler.end_epoch()
            self._turns.pass_is_over()

    # -- the backward pass (backward.BackwardListener) -----------------------------------------------------------------

    def backward_begins(self, roots: list[Tensor]) -> None:
        """Note that what was looked at is trained on: also in a step that is left out, or not ended."""
        self._has_gone_backward = self._is_heard = True
        self._ahead.trained()
        self._trained()
        backward.forget(self)  # until the next batch

    def backward_ended(self, roots: list[Tensor]) -> None:
        """Nothing."""

    # -- counting ------------------------------------------------------------------------------------------------------

    def _count(self, dealt: Any, one: Any) -> None:
        self.counts = True
        has_gradients = torch.is_grad_enabled()
        if self._look is None or self._look.has_gradients != has_gradients:
            self._look = _Look(self.sampler.place, self._updates(), has_gradients)
            self._has_gone_backward = False
        if self._last is None or self._last() is not one:
            self._last = weakref.ref(one, self._freed)
        self.sampler.go_on_with(dealt)
        self.sampler.advance()
        self._ahead.delivered(dealt)
        self._is_waiting, self._updates_before = True, self._updates()
        self.sampler.held = self._ahead.batches + self._is_heard
        backward.listen(self)

    def _trained(self) -> None:
        """The batch counted last is trained on, or that before those which the loop fetches ahead."""
        self._is_waiting, self.sampler.held = False, self._ahead.batches
        self._turns.trained()

    def _leave(self) -> None:
        """Let a pass that begins go on where the one before was left; or begin with what was only looked at."""
        if self._look is not None and not self._go_back():
            self.sampler.give_back(self.sampler.held)
            self.sampler.end_epoch()

    def _go_back(self) -> bool:
        """Undo the counting of a pass that nothing was trained in; return whether there was one."""
        look, self._look = self._look, None
        if look is None or self._updates() != look.updates or (look.has_gradients and self._has_gone_backward):
            return False
        self.sampler.return_to(look.place)
        return True

    def _freed(self, one: weakref.ref[Any]) -> None:
        """The loop has left a pass, or come to its end."""
        if one is self._last:
            self._turns.pass_is_over()

    def _note(self, proxy: LoaderProxy) -> None:
        """Note what the sampler calls the pass begun last: nothing else has begun since then."""
        newest = proxy._accel_fetching.underway.newest
        if newest is not None and newest not in self._dealt:
            self._dealt[newest] = self.sampler.running_pass
            self._began[newest] = self._updates()


class RemainingEpochs(Sequence[int]):
    """Numbers of epochs, as a range of them; going through them tells the loader which are over.

    Args:
        sampler: of the loader.
        numbers: that are left.
    """

    def __init__(self, sampler: ElasticSampler, numbers: range) -> None:
        self._sampler, self._numbers = sampler, numbers

    def __iter__(self) -> Iterator[int]:
        turns = turns_of(self._sampler)
        for number in self._numbers:
            turns.begin(number)
            yield number
        if self._numbers:
            turns.finish(self._numbers.stop)

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
