"""The next epoch of a loader with workers of its own, begun while the loop is at the last batches of this one.

A `DataLoader` with workers starts them anew for each epoch, and the loop waits for their first
batches. Here torch's own iterator over the next epoch is made as soon as all index lists of this
one have been given out, under a copy of the random states. It is used if the next epoch is the one
that the loader would begin then: random states, samplers, options and dataset are compared. So the
batches are those of the plain loader, whatever dataset and `worker_init_fn` do.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel.dataio.dataset.watch import DatasetWatch
from accel.dataio.fetching.fetch import fetch_of
from accel.dataio.passes import epochs
from accel.dataio.passes.epochs import Ahead, AheadLists, Guesses
from accel.dataio.passes.movable import not_continuable
from accel.profiler.errors import InvalidArgument
from accel.profiler.interruptions import ours

_OPTIONS = (
    *("collate_fn", "worker_init_fn", "num_workers", "prefetch_factor", "timeout", "pin_memory", "generator"),
    *("multiprocessing_context", "persistent_workers", "in_order"),
)


class NextEpoch:
    """Begins a loader's epochs, the next one early where it can be known; raises InvalidArgument if `not_continuable`.

    `used` counts epochs that were begun early, in time.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        if reason := not_continuable(loader):
            raise InvalidArgument(reason)
        self._loader = loader
        self._early: _EarlyEpoch | None = None
        self._looked_from: weakref.ref[Any] | None = None
        self.used, self.guesses = 0, Guesses()

    def begin(self) -> Iterator[Any]:
        """Return torch's iterator over the epoch that begins now."""
        loader, early = self._loader, self._early
        self._early = None
        self.guesses.epoch_begins(epochs.epoch_of(loader))
        if early is None:
            return iter(loader)
        if early.is_right(loader):
            self.used += 1
            self.guesses.was_right()
            return early.begin(loader)
        self.guesses.was_wrong(can_learn=epochs.same_draws(loader, early.ahead))
        early.close()
        return iter(loader)

    def look_ahead(self, batches: Any) -> None:
        """Begin the next epoch if an iterator of torch's has given out all index lists of this one; once for each."""
        if self._early is not None or not self.guesses.are_worth_it or not hasattr(batches, "_send_idx"):
            return
        is_full = batches._send_idx - batches._rcvd_idx >= batches._prefetch_factor * batches._num_workers
        if is_full or (self._looked_from is not None and self._looked_from() is batches):
            return
        self._looked_from = weakref.ref(batches)
        try:
            ahead = epochs.draw_ahead(self._loader, step=self.guesses.step)
            if ahead is None or (watch := DatasetWatch(fetch_of(self._loader))).unseen_at_all:
                return
            self._early = _EarlyEpoch(self._loader, ahead, watch)
        except ours():  # it is raised again when the epoch begins, or was a moment's lack of memory
            self.guesses.was_wrong(can_learn=False)

    def close(self) -> None:
        """End the workers of an epoch that was begun early."""
        early, self._early = self._early, None
        if early is not None:
            early.close()


class _EarlyEpoch:
    """An epoch begun early; `watch` sees what changes in the dataset since."""

    def __init__(self, loader: DataLoader[Any], ahead: Ahead, watch: DatasetWatch) -> None:
        self.ahead, self._watch, self._conditions = ahead, watch, _conditions(loader)
        own: DataLoader[Any] = object.__new__(type(loader))
        own.__dict__.update(loader.__dict__)
        # The base seed is the generator's first number.
        generator = torch.Generator()
        generator.set_state(ahead.before[0 if loader.generator is None else 1])
        self._lists = AheadLists(loader, ahead.lists)  # torch asks them for an iterator twice
        own.__dict__.update(batch_sampler=self._lists, generator=generator)
        self._batches: Any = iter(own)

    def is_right(self, loader: DataLoader[Any]) -> bool:
        """Return whether it is the epoch that the loader would begin now."""
        same_conditions = _conditions(loader) == self._conditions and not self._watch.changed(thoroughly=True)
        return same_conditions and self.ahead.holds(loader) and epochs.same_draws(loader, self.ahead)

    def begin(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Make it the running epoch: its draws count from now on."""
        self.ahead.begin(loader)
        self.ahead.start(loader)
        self._lists.begin()
        batches: Iterator[Any] = self._batches
        return batches

    def close(self) -> None:
        self._batches._shutdown_workers()


def _conditions(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """Return what else batches depend on: options of the loader that may be set, and modes of torch."""
    cast = [torch.is_autocast_enabled(each) and torch.get_autocast_dtype(each) for each in ("cpu", "cuda")]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.empty(0).device, torch.get_default_dtype()
    return *(getattr(loader, name) for name in _OPTIONS), *cast, *modes
