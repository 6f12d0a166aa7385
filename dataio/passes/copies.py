"""Which state of the dataset an engine's copies have, and what to do when the loop's own is another."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from accel.dataio.dataset.numbers import Forecast, Numbers, differing, numbers_of
from accel.dataio.dataset.watch import DatasetWatch
from accel.dataio.engine.engine import Engine
from accel.dataio.fetching.fetch import fetch_of
from accel.dataio.passes import epochs


class _Copies(NamedTuple):
    """The state of the dataset that an engine's copies have."""

    version: int
    """Of the dataset, apart from its numbers."""
    numbers: Numbers
    epoch: int
    """In which they were made, or last found to be as they should."""


class DatasetCopies:
    """The loop's dataset, and the copies that engines have of it.

    Args:
        loader: whose dataset and collate function they are.

    Attributes:
        watch: sees what changes in the loop's own.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader, self._fetch = loader, fetch_of(loader)
        self.watch, self._version = DatasetWatch(self._fetch), 0
        self._began: Numbers | None = None
        self._forecast = Forecast(self._fetch)
        self._of: weakref.WeakKeyDictionary[Engine, _Copies] = weakref.WeakKeyDictionary()

    def look(self) -> None:
        """Look at the dataset and the collate function as they are now."""
        is_other = self._fetch.collate is not self._loader.collate_fn
        self._fetch.collate = self._loader.collate_fn
        if is_other or self.watch.changed(thoroughly=True, numbers=False):
            self.watch, self._version = DatasetWatch(self._fetch), self._version + 1
        else:
            self.watch.numbers = numbers_of(self._fetch.dataset)

    def begin_epoch(self, *, whole: bool) -> None:
        """Learn how the numbers move from one epoch to the next; `whole` if this one begins at its first batch."""
        if whole and self._began is not None:
            self._forecast.saw(self._began, self.watch.numbers)
        self._began = self.watch.numbers

    def made(self, engine: Engine, epoch: int) -> None:
        """Note that an engine's copies have just been made, for an epoch."""
        self._of[engine] = _Copies(self._version, self.watch.numbers, epoch)

    def forget(self, engine: Engine) -> None:
        """Note that an engine has no copies any more."""
        self._of.pop(engine, None)

    def refresh(self, engine: Engine, epoch: int) -> None:
        """Bring an engine's copies to the dataset's present state, as `epoch` begins or goes on."""
        copies, watch = self._of.get(engine), self.watch
        if copies is not None:
            # What can't be seen may have changed: then workers last as long as those of a plain loader.
            unseen = bool(watch.unseen_at_all) and not epochs.persistent(self._loader) and copies.epoch != epoch
            changed = differing(copies.numbers, watch.numbers)
            if copies.version != self._version or unseen or changed is None:
                engine.restart()
            elif changed:
                engine.update(changed)
        self.made(engine, epoch)

    def are_right(self, engine: Engine) -> bool:
        """Return whether the dataset is in the state that an engine's copies have, or are expected to have."""
        copies = self._of.get(engine)
        if copies is None or self._loader.collate_fn is not self._fetch.collate or copies.version != self._version:
            return False
        same_numbers = differing(copies.numbers, numbers_of(self._fetch.dataset)) == {}
        return same_numbers and not self.watch.changed(thoroughly=True, numbers=False)

    def expected(self, engine: Engine) -> tuple[Numbers, Any] | None:
        """Return what an engine is to make the next epoch's batches from, before that begins.

        Returns:
            The numbers that differ by then, and the dataset to read in place of the loop's own, None for that; None if
            it can't be had, or could change without being seen.
        """
        if self.watch.unseen_at_all:
            return None
        numbers = self._of[engine].numbers
        following = self._forecast.next(numbers)
        changed, view = differing(numbers, following), None
        if changed and not engine.copies:
            view = self._forecast.view(self._fetch.dataset, following)
            if view is None:
                return None  # made now, the batches would be those of this epoch's dataset
        return changed or {}, view

    def expect(self, engine: Engine, changed: Numbers) -> None:
        """Have an engine's copies be as they are expected to be in the next epoch."""
        if changed:
            engine.update(changed)
        copies = self._of[engine]
        self._of[engine] = copies._replace(numbers={**copies.numbers, **changed})
