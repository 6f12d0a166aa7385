"""Keep an engine busy with the batches of the running epoch, and with those of the next one before it is asked for.

The index lists come from the loader's own samplers, in their order. At most `engine.capacity` of
them are drawn before their batch is asked for; at the end of an epoch they come from the next one
(accel.dataio.passes.epochs). The engine then goes on making batches while the loop validates,
saves, or prints. What was fetched ahead is used only if it is what the plain loader would have
made: the random states, the sampler's epoch and the dataset are compared when the next epoch
begins.

    jobs:   collected, maybe in the loop's hands | the engine has them | drawn | the next epoch's
            ^ handed                             ^ served

A batch stays on record until the loop asks for one after it. So after Ctrl-C, wherever it came,
the engine is emptied and makes again everything from `handed` on.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from accel.dataio.dataset.numbers import Forecast, Numbers, differing, numbers_of
from accel.dataio.dataset.watch import DatasetWatch
from accel.dataio.engine.engine import BatchJob, Engine, InlineEngine
from accel.dataio.fetching.fetch import fetch_of
from accel.dataio.passes import epochs
from accel.dataio.passes.epochs import Ahead, Draws, IndexLists, States
from accel.dataio.passes.not_ahead import AheadCheck
from accel.profiler.interruptions import ours

_MOST_WRONG = 3  # guesses in a row, after which the next epoch is not guessed any more


class PrefetchAcrossEpochs:
    """Fetch batches by `engine` from index lists that may outlive the epoch.

    Args:
        loader: map-style loader whose samplers, collate function and worker_init_fn are used.
        engine: makes the batches.
        strict, whole: see `AheadCheck`.

    Attributes:
        failed_guesses: how often the next epoch was prefetched in vain.
        base_seed: of the random numbers in the running epoch.
        served: number of the next batch to be collected in the running epoch.
        handed: number of the first batch that the loop has not got; set by whoever hands them over.
        feeding: indices are drawn; False after `close_feed`.
    """

    def __init__(self, loader: DataLoader[Any], engine: Engine, *, strict: bool = False, whole: bool = False) -> None:
        self.loader, self.engine = loader, engine
        self.check = AheadCheck(loader, strict=strict, whole=whole, seeded=isinstance(engine, InlineEngine))
        self.failed_guesses = self._wrong = 0
        self._seeded = loader.worker_init_fn is None
        self._ended = self.feeding = False
        self._lists = IndexLists(loader, Draws(loader, iter(())))
        # Jobs of the running epoch, then of the next one. The first have been collected, the engine has those after.
        self._record: deque[BatchJob] = deque()
        self._collected = self._given = 0
        self._failed = False  # the oldest could not be made
        self._owner = os.getpid()  # 0 while what is under way is thrown away
        self.sampler_error: Exception | None = None
        self._epoch = self.served = self.handed = self.base_seed = 0
        self._may_look_ahead = True
        self._ahead: tuple[Ahead, IndexLists] | None = None
        self._resumed: Ahead | None = None
        # States of the loader's own generators: after all that was drawn in this epoch, after what was drawn for the
        # batches collected, and for those handed over.
        self._drawn: States = []
        self._after: States = []
        self._after_handed: States = []
        self._epoch_step = 1
        self._begun_at: int | None = None
        self._copies = DatasetCopies(loader)

    # -- one epoch -----------------------------------------------------------------------------------------------------

    def take(self, indices: Iterator[Any], *, base_seed: int = 0, first: int = 0, ahead: bool = True) -> None:
        """Begin to feed the engine from `indices`, the index lists that are still to come in the running epoch.

        Args:
            indices: the index lists; drawn from at most `engine.capacity` batches early.
            base_seed: of the random numbers in this epoch.
            first: number of the first list in its epoch.
            ahead: go on with the next epoch at its end, if that can be drawn ahead.
        """
        self.drop()
        self._note_epoch(first)
        self._copies.refresh(self.engine, self._epoch + 1)
        self.served = first
        self._feed(indices, base_seed)
        self.check.switched()
        self._may_look_ahead = ahead and self._wrong < _MOST_WRONG

    def _feed(self, indices: Iterator[Any], base_seed: int) -> None:
        self._epoch += 1
        if not isinstance(indices, IndexLists):
            indices = IndexLists(self.loader, Draws(self.loader, indices))
        self._lists, self.base_seed = indices, base_seed
        self.engine.base_seed = base_seed
        self._number_lists()
        self._ahead, self._resumed, self._collected, self.handed = None, None, 0, self.served
        self._drawn = self._after = self._after_handed = self._lists.draws.generators()
        self._ended, self.feeding = False, True

    def prime(self) -> None:
        """Draw the first index lists and hand them to the engine, as a loader with workers does when a pass begins."""
        self._start()
        self._fill()

    def fetch(self) -> Any:
        """Return the next batch of the running epoch; raises StopIteration at its end or when drained.

        After an Exception the batch is passed over, unless another engine is switched to, which makes it again.
        """
        if os.getpid() != self._owner:  # a copy of the loader in a forked process, or Ctrl-C once more
            self.interrupted()
        self.skip_failed()
        self._forget_handed()
        if self._resumed is not None:
            self._start()
        if self._lists.has_new_size and self._under_way():
            self._take_back()
            self._give_lists_back()
        self.check.refuse(drawn_since=not self._ended and not epochs.same(self._lists.draws.generators(), self._drawn))
        self._fill()
        job = self._record[self._collected] if len(self._record) > self._collected else None
        if job is None or job.epoch != self._epoch:
            self._ended = True
            raise StopIteration
        if self.check.is_stale(job.indices):
            self._renew()
        try:
            batch = self.engine.collect()
        except ours():
            self._given, self._failed = self._given - 1, True
            raise
        self._given -= 1
        self.check.compare(job, batch)
        self._count_collected()
        if self.engine.capacity > 1:
            self._fill_early()
        return batch

    def _under_way(self) -> list[BatchJob]:
        """Return the jobs of the running epoch that have not been collected."""
        return [job for job in islice(self._record, self._collected, None) if job.epoch == self._epoch]

    def _count_collected(self) -> None:
        job = self._record[self._collected]
        self._collected += 1
        self.served, self._after = job.number + 1, job.after

    def _forget_handed(self) -> None:
        record = self._record  # not by the count: an interruption may come before it is put right
        while record and record[0].epoch == self._epoch and record[0].number < self.handed:
            self._after_handed = record[0].after
            record.popleft()
            self._collected = max(0, self._collected - 1)

    def _renew(self) -> None:
        """Make anew what was made ahead: the loop has changed the dataset within the epoch."""
        self._take_back()
        self._look()
        self._copies.refresh(self.engine, self._epoch)
        self._give()

    def skip_failed(self) -> None:
        """Pass over the batch that could not be made, if there is one."""
        if self._failed:
            self._failed = False
            self._count_collected()

    def interrupted(self) -> None:
        """Throw away what is under way, whatever it was at; the batches from `handed` on are made again."""
        self._owner = 0
        self.engine.reset()
        self._forget_handed()
        self.served, self._after = self.handed, self._after_handed
        self._collected = self._given = 0
        self._failed = self._may_look_ahead = False
        self._forget_ahead()
        self._copies.forget(self.engine)
        self._look()
        self._copies.made(self.engine, self._epoch)
        self._owner = os.getpid()

    def close_feed(self) -> None:
        """Draw no more indices: `fetch` then returns what is under way in this epoch and ends."""
        self.feeding, self._ahead = False, None

    def left(self) -> IndexLists:
        """Return the index lists of this epoch that have not been served: those under way, then the rest.

        For going on without the engine, after a failure or when it is drained.
        """
        if self._resumed is not None:
            self._redraw()
        self._give_lists_back()
        self.close_feed()
        return self._lists

    def _give_lists_back(self) -> None:
        """Have the lists under way be drawn again, and the generators be as if they had not been drawn."""
        pending, before, after = self._under_way(), self._after, self._drawn
        if open_end := self.feeding and not self._ended:
            self._put_back()
        self._lists.give_back(pending, before if open_end else None, after)
        self._drawn = self._after  # what is not put back counts as drawn
        self._record = deque(islice(self._record, self._collected))
        self._number_lists()

    def leave(self) -> None:
        """Have generators be as the batches that were served had left them: the loop has left the epoch."""
        self._put_back()

    def _put_back(self) -> None:
        if self._drawn and not self._ended:
            self._lists.draws.put_back(self._drawn, self._after)
            self._drawn = self._after  # once: an older pass may draw what leads to the same state

    def drop(self) -> None:
        """Forget what is under way; generators go back to where the batches that were served had left them."""
        self._put_back()
        self.close_feed()
        if self._given:
            self.engine.discard()
        self._record.clear()
        self._collected = self._given = 0
        self._failed, self._resumed = False, None

    def know(self, engine: Engine) -> None:
        """Record that an engine's copies of the dataset have just been made."""
        self._look()
        self._copies.made(engine, self._epoch + 1)

    def close(self) -> None:
        """Give up the engine's threads and processes; the next `take` starts them anew."""
        self.drop()
        self.engine.close()

    def switch(self, engine: Engine) -> None:
        """Go on with another engine from the next batch on; what is under way is made again by it."""
        if engine is self.engine:
            return
        self._take_back()  # the next epoch too, drawn under a state of the dataset that the other engine does not have
        self._failed = False
        self.engine = engine
        self._look()
        self._copies.refresh(engine, self._epoch)

    def renew_copies(self) -> None:
        """Have the engine's processes, if it has any, started anew for the next batch."""
        self._take_back()
        self.engine.restart()
        self.know(self.engine)

    def _take_back(self) -> None:
        """Have the engine forget what is under way; it gets those of this epoch again."""
        self._forget_ahead()
        self.engine.discard()
        self._given = 0

    def _forget_ahead(self) -> None:
        self._record = deque(job for job in self._record if job.epoch == self._epoch)
        self._ahead = None

    # -- the epoch after -----------------------------------------------------------------------------------------------

    def resume(self) -> bool:
        """Go on with the epoch drawn ahead, if it is what the loader would draw now; return whether it is.

        On success the random states are advanced exactly as beginning the plain loader's epoch would have.
        """
        if self._ahead is None or self._under_way() or not (self._ended or epochs.same(self._drawn, self._after)):
            # Nothing drawn ahead, or the loop left the epoch before its last batch; or with it, but without asking for
            # one more, which is when the sampler would have drawn once more.
            return False
        ahead, lists = self._ahead
        undisturbed = epochs.same_draws(self.loader, ahead)
        if not (undisturbed and ahead.holds(self.loader)) or not self._copies.are_right(self.engine):
            self.failed_guesses += 1
            # A loop that draws random numbers of its own between the two will do so again; epochs can be learnt.
            self._wrong += 1 if undisturbed else _MOST_WRONG
            return False
        self._wrong = 0
        self._note_epoch(0)
        self._copies.refresh(self.engine, self._epoch + 1)
        epochs.begin_ahead(self.loader, ahead)
        ahead.peeked.begin()
        self._begin(ahead, lists)
        return True

    def _begin(self, ahead: Ahead, lists: IndexLists) -> None:
        """Make the epoch drawn ahead the running one; its lists count once the first batch is asked for."""
        self._record = deque(job for job in self._record if job.epoch != self._epoch)
        self._epoch += 1
        self._collected = 0
        self._ahead, self._resumed, self._lists = None, ahead, lists
        self.base_seed = self.engine.base_seed = ahead.base_seed
        self._ended, self.served, self.handed = False, 0, 0
        self._drawn, self._after = ahead.draws.generators(), ahead.began[1:]
        self._after_handed = self._after
        self._may_look_ahead = True

    def _start(self) -> None:
        """Have the lists that were drawn ahead count, unless the loop drew something since the epoch began."""
        ahead = self._resumed
        if ahead is None:
            return
        if epochs.same(epochs.capture(self.loader), ahead.began):
            ahead.draws.begin()
        elif ahead.draws.drew(ahead.began):
            self._wrong += _MOST_WRONG
            self._may_look_ahead = False
            self.failed_guesses += 1
            self._redraw()
        else:
            ahead.draws.keep()
        self._resumed = None

    def _redraw(self) -> None:
        """Throw the lists away that were drawn ahead, and draw them under the present random states."""
        self.engine.discard()
        self._record.clear()
        self._given = 0
        self._feed(iter(self.loader._index_sampler), self.base_seed)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        self._give()
        while self.feeding and len(self._record) - self._collected < self.engine.capacity:
            try:
                drawn = self._draw()
            except ours():
                if len(self._record) > self._collected or self._ahead is not None:
                    return  # it comes after the batches of the lists that were drawn before
                raise
            if drawn:
                self._give()
            elif not self._look_ahead():
                return

    def _fill_early(self) -> None:
        try:
            self._fill()
        except ours():
            return  # it is raised again when the next batch is asked for, and not in place of the one in hand

    def _give(self) -> None:
        most = min(len(self._record) - self._collected, self.engine.capacity)
        while self._given < most:
            job = self._record[self._collected + self._given]
            self.engine.submit(job._replace(watch=self.check.watch) if self.check.strict else job)
            self._given += 1

    def _draw(self) -> bool:
        """Take the next index list into the record; return whether there was one."""
        lists = self._lists if self._ahead is None else self._ahead[1]
        if lists.exhausted:
            return False
        try:
            drawn = lists.next_job(self._record.append)
        except ours() as error:
            self.sampler_error = error
            raise
        if self._ahead is None:
            self._drawn = self._record[-1].after if drawn else self._lists.draws.generators()
        return drawn

    def _look_ahead(self) -> bool:
        """Draw the next epoch's index lists, when this one's have all been given out."""
        if self._ahead is not None or not self._may_look_ahead or self.engine.capacity < 2:
            return False  # one epoch ahead is enough: the look-ahead is bounded in batches
        self._may_look_ahead = False  # once in an epoch
        expected = self._copies.expected(self.engine)
        if expected is None:
            return False
        changed, view = expected
        seeded = self.base_seed if epochs.persistent(self.loader) else None
        ahead = epochs.draw_ahead(self.loader, step=self._epoch_step, seeded=seeded)
        if ahead is None:
            return False
        self._copies.expect(self.engine, changed)
        lists = IndexLists(self.loader, ahead.draws)
        lists.number(self._epoch + 1, ahead.base_seed if self._seeded else None, dataset=view)
        self._ahead = ahead, lists
        return True

    def _number_lists(self) -> None:
        self._lists.number(self._epoch, self.base_seed if self._seeded else None, self.served)

    def _note_epoch(self, first: int) -> None:
        """Learn how the sampler's epoch and the dataset move from one epoch to the next."""
        self._look()
        epoch = epochs.epoch_of(self.loader)
        self._copies.begin_epoch(whole=not first)
        # After an early break some samplers stay where they are: this says nothing about the end of an epoch.
        if not first and self._ended and epoch is not None and self._begun_at is not None:
            self._epoch_step = epoch - self._begun_at
        self._begun_at = epoch

    def _look(self) -> None:
        self._copies.look()
        self.check.look(None if isinstance(self.engine, InlineEngine) else self._copies.watch)


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
