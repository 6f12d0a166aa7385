"""Keep an engine busy with the batches of the running epoch, and with those of the next one before it is asked for.

The index lists come from the loader's own samplers, in their order. At most `engine.capacity` of
them are drawn before their batch is asked for; at the end of an epoch they come from the next one
(accel.dataio.passes.epochs). The engine then goes on making batches while the loop validates,
saves, or prints. What was fetched ahead is used only if it is what the plain loader would have
made: the random states, the sampler's epoch and the dataset are compared when the next epoch
begins, and the random states once more when its first batch is asked for.

    drawn ahead -- resume -> begun, its lists don't count yet -- prime -> running -- drop -> left
    take --------------------------------------------------------------->

What has become of the batches of an epoch is in `accel.dataio.passes.epoch_jobs`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from accel.dataio.dataset.numbers import Forecast, Numbers, differing, numbers_of
from accel.dataio.dataset.watch import DatasetWatch
from accel.dataio.engine.engine import Engine, InlineEngine
from accel.dataio.fetching.fetch import fetch_of
from accel.dataio.passes import epochs
from accel.dataio.passes.epoch_jobs import EpochJobs, IndexLists
from accel.dataio.passes.epochs import Guesses
from accel.dataio.passes.not_ahead import AheadCheck
from accel.profiler.interruptions import ours


class PrefetchAcrossEpochs:
    """Fetch batches by `engine` from index lists that may outlive the epoch; `strict`, `whole`: see `AheadCheck`.

    Attributes:
        epoch: the jobs of the running epoch; those of the next one, drawn ahead, follow on it.
        guesses: what the next epoch is drawn ahead from, and how often that was in vain.
    """

    def __init__(self, loader: DataLoader[Any], engine: Engine, *, strict: bool = False, whole: bool = False) -> None:
        self.loader, self.engine = loader, engine
        self.check = AheadCheck(loader, strict=strict, whole=whole, seeded=isinstance(engine, InlineEngine))
        self.copies, self.guesses = DatasetCopies(loader, self.check), Guesses()
        self.epoch = EpochJobs(IndexLists(loader, iter(())))
        self.epoch.feeding = False
        self._owner = os.getpid()

    def take(self, indices: Iterator[Any], *, base_seed: int = 0, first: int = 0, ahead: bool = True) -> None:
        """Begin to feed the engine from the index lists that are still to come in the running epoch.

        Args:
            indices: the index lists; drawn from at most `engine.capacity` batches early.
            base_seed: of the random numbers in this epoch.
            first: number of the first list in its epoch.
            ahead: go on with the next epoch at its end, if that can be drawn ahead.
        """
        if os.getpid() != self._owner:  # a copy in a forked process
            self.interrupted()
        self.drop()
        self.guesses.epoch_begins(epochs.epoch_of(self.loader), at_an_end=not first and self.epoch.ended)
        self.copies.begin_epoch(self.engine, whole=not first)
        lists = indices if isinstance(indices, IndexLists) else IndexLists(self.loader, indices)
        lists.number(base_seed, first)
        self.epoch = EpochJobs(lists, may_look_ahead=ahead and self.guesses.are_worth_it)
        self.check.switched()

    def resume(self) -> bool:
        """Go on with the epoch drawn ahead, if it is what the loader would draw now; return whether it is.

        On success the random states are advanced exactly as beginning the plain loader's epoch
        would have.
        """
        following = self.epoch.following
        if following is None or following.ahead is None or not (self.epoch.feeding and self.epoch.is_over):
            return False
        if os.getpid() != self._owner:
            return False
        ahead = following.ahead
        undisturbed = epochs.same_draws(self.loader, ahead)
        if not (undisturbed and ahead.holds(self.loader)) or not self.copies.are_right(self.engine):
            self.guesses.was_wrong(can_learn=undisturbed)
            return False
        self.guesses.was_right()
        self.guesses.epoch_begins(epochs.epoch_of(self.loader), at_an_end=self.epoch.ended)
        self.copies.begin_epoch(self.engine, whole=True)
        ahead.begin(self.loader)
        self.epoch = following
        return True

    def left(self) -> IndexLists:
        """Return the index lists of this epoch that have not been served: those under way, then the rest.

        For going on without the engine, after a failure or when it is drained.
        """
        if self.epoch.ahead is not None:
            self._redraw()
        self.epoch.give_lists_back()
        self.epoch.feeding = False
        return self.epoch.lists

    def _redraw(self) -> None:
        """Throw the lists away that were drawn ahead, and draw them under the present random states."""
        self.epoch.take_back(self.engine)
        lists = IndexLists(self.loader, iter(self.loader._index_sampler), self.epoch.lists.base_seed)
        self.epoch = EpochJobs(lists, may_look_ahead=False)

    def drop(self) -> None:
        self.epoch.drop(self.engine)

    def close(self) -> None:
        """Give up the engine's threads and processes; the next `take` starts them anew."""
        self.drop()
        self.engine.close()

    def fetch(self) -> Any:
        """Return the next batch of the running epoch; raises StopIteration at its end or when drained.

        After an Exception the batch is passed over, unless another engine is switched to, which
        makes it again.
        """
        if os.getpid() != self._owner:
            self.interrupted()
            raise StopIteration
        self.epoch.move_on()
        self.prime()
        epoch = self.epoch
        if (job := epoch.oldest) is None:
            epoch.ended = True
            if epoch.feeding:
                epoch.lists.end()
            raise StopIteration
        if self.check.is_stale(job.indices):  # the loop has changed the dataset within the epoch
            epoch.take_back(self.engine)
            self.copies.refresh(self.engine)
            self._fill()
        try:
            batch = self.engine.collect()
            self.check.compare(job, batch)
        except ours():
            epoch.failed = True
            raise
        epoch.collected(job)
        try:
            if self.engine.capacity > 1:
                self._fill()
        except ours():
            return batch  # it is raised again when the next batch is asked for, and not in place of the one in hand
        return batch

    def prime(self) -> None:
        """Draw index lists and hand them to the engine, as a loader with workers does when a pass begins."""
        ahead = self.epoch.ahead
        if ahead is not None and not ahead.start(self.loader):
            self.guesses.was_wrong(can_learn=False)
            self._redraw()
        epoch = self.epoch
        epoch.ahead = None
        if epoch.lists.has_new_size and epoch.waiting:
            epoch.take_back(self.engine)
            epoch.give_lists_back(is_on_demand=False)
        self.check.refuse()
        self._fill()

    def _fill(self) -> None:
        """Draw lists and give the engine their jobs, until it has as many as it may have."""
        epoch, engine = self.epoch, self.engine
        engine.base_seed = epoch.lists.base_seed
        while epoch.give(engine, self.check, engine.capacity) > 0 and epoch.feeding:
            try:
                drawn = epoch.draw()
            except ours():
                if epoch.waiting or epoch.following is not None:
                    return  # it comes after the batches of the lists that were drawn before
                raise
            if not drawn and not self._look_ahead():
                return

    def _look_ahead(self) -> bool:
        """Draw the next epoch's index lists, when this one's have all been given out."""
        epoch = self.epoch
        if epoch.following is not None or not epoch.may_look_ahead or self.engine.capacity < 2:
            return False  # one epoch ahead is enough: the look-ahead is bounded in batches
        epoch.may_look_ahead = False  # once in an epoch
        expected = self.copies.expected(self.engine)
        if expected is None:
            return False
        changed, view = expected
        seeded = epoch.lists.base_seed if epochs.persistent(self.loader) else None
        ended = epoch.lists.is_over
        ahead = epochs.draw_ahead(self.loader, step=self.guesses.step, seeded=seeded, ended=ended)
        if ahead is None:
            return False
        self.copies.expect(self.engine, changed)
        epoch.following = EpochJobs(IndexLists(self.loader, ahead.lists, ahead.base_seed, view, is_ahead=True), ahead)
        return True

    def interrupted(self) -> None:
        """Give up what the engine has, whatever it was at: the batches from `handed` on are made without it."""
        self._owner = 0  # Ctrl-C may come once more
        self.engine.reset()
        self.epoch.go_back()
        self.epoch.feeding = False
        self.copies.made(self.engine)
        self._owner = os.getpid()

    def switch(self, engine: Engine) -> None:
        """Go on with another engine from the next batch on; what is under way is made again by it."""
        if engine is self.engine:
            return
        self.epoch.take_back(self.engine)  # the next epoch too, drawn under a state that the other engine does not have
        self.engine = engine
        self.copies.refresh(engine)

    def renew_copies(self) -> None:
        """Have the engine's processes, if it has any, started anew for the next batch."""
        self.epoch.take_back(self.engine)
        self.engine.restart()
        self.copies.made(self.engine)


class _Copies(NamedTuple):
    """The state of the dataset that an engine's copies have, and the epoch in which that was last looked at."""

    version: int
    numbers: Numbers
    epoch: int


class DatasetCopies:
    """The loop's dataset, and the copies that engines have of it; `check` is told what to watch of the dataset."""

    def __init__(self, loader: DataLoader[Any], check: AheadCheck) -> None:
        self._loader, self._fetch, self._check = loader, fetch_of(loader), check
        self._watch, self._version, self._epoch = DatasetWatch(self._fetch), 0, 0
        self._began: Numbers | None = None
        self._forecast = Forecast(self._fetch)
        self._of: weakref.WeakKeyDictionary[Engine, _Copies] = weakref.WeakKeyDictionary()

    def _look(self, engine: Engine) -> None:
        """Look at the dataset and the collate function as they are now, when an engine makes the batches."""
        is_other = self._fetch.collate is not self._loader.collate_fn
        self._fetch.collate = self._loader.collate_fn
        if is_other or self._watch.changed(thoroughly=True, numbers=False):
            self._watch, self._version = DatasetWatch(self._fetch), self._version + 1
        else:
            self._watch.numbers = numbers_of(self._fetch.dataset)
        self._check.look(None if isinstance(engine, InlineEngine) else self._watch)

    def begin_epoch(self, engine: Engine, *, whole: bool) -> None:
        """Begin an epoch, and learn how the numbers move to it if it is `whole`: it begins at its first batch."""
        self._epoch += 1
        self.refresh(engine)
        if whole and self._began is not None:
            self._forecast.saw(self._began, self._watch.numbers)
        self._began = self._watch.numbers

    def made(self, engine: Engine, *, early: bool = False) -> None:
        """Note that an engine's copies have just been made, for the running epoch, or `early` for the next one."""
        self._of.pop(engine, None)
        self._look(engine)
        self._of[engine] = _Copies(self._version, self._watch.numbers, self._epoch + early)

    def refresh(self, engine: Engine) -> None:
        """Bring an engine's copies to the dataset's present state."""
        self._look(engine)
        copies, watch = self._of.get(engine), self._watch
        if copies is not None:
            # What can't be seen may have changed: then workers last as long as those of a plain loader.
            unseen = bool(watch.unseen_at_all) and not epochs.persistent(self._loader) and copies.epoch != self._epoch
            changed = differing(copies.numbers, watch.numbers)
            if copies.version != self._version or unseen or changed is None:
                engine.restart()
            elif changed:
                engine.update(changed)
        self._of[engine] = _Copies(self._version, watch.numbers, self._epoch)

    def are_right(self, engine: Engine) -> bool:
        """Return whether the dataset is in the state that an engine's copies have, or are expected to have."""
        copies = self._of.get(engine)
        if copies is None or self._loader.collate_fn is not self._fetch.collate or copies.version != self._version:
            return False
        same_numbers = differing(copies.numbers, numbers_of(self._fetch.dataset)) == {}
        return same_numbers and not self._watch.changed(thoroughly=True, numbers=False)

    def expected(self, engine: Engine) -> tuple[Numbers, Any] | None:
        """Return what an engine is to make the next epoch's batches from, before that begins.

        These are the numbers that differ by then, and the dataset to read in place of the loop's
        own, None for that; None if it can't be had, or could change without being seen.
        """
        if self._watch.unseen_at_all:
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
