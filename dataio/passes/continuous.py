"""Keep an engine busy with the batches of the running epoch, and with those of the next one before it is asked for.

The index lists come from the loader's own samplers, in their order. At most `engine.capacity` of them are drawn before
their batch is asked for; at the end of an epoch they come from the next one (accel.dataio.passes.epochs). The engine
then goes on making batches while the loop validates, saves, or prints. What was fetched ahead is used only if it is
what the plain loader would have made: the random states, the sampler's epoch and the dataset are compared when the next
epoch begins. Ctrl-C may come between any two lines here: then the engine is emptied, and makes again what the loop has
not been handed (`Continuous.mend`).
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from accel.dataio.dataset.snapshot import DatasetSnapshot, Forecast, compare, take_snapshot
from accel.dataio.engine.engine import BatchJob, Engine, InlineEngine
from accel.dataio.fetching.fetch import fetch_of
from accel.dataio.passes import epochs
from accel.dataio.passes.epochs import Ahead, Draws, States, capture, draw_ahead, epoch_of, same, same_draws
from accel.dataio.passes.jobs import AsDrawn, Jobs, ListLost, NoMoreLists, lists_left
from accel.dataio.passes.live_sampler import LiveSampler
from accel.dataio.passes.mending import mended
from accel.dataio.passes.not_ahead import AheadCheck
from accel.profiler.interruptions import ours

_MOST_WRONG = 3  # guesses in a row, after which the next epoch is not guessed any more
# Batches fetched that may not have reached the loop: the last one, and the one whose copy to the device goes before it.
_RECENT = 2


class Continuous:
    """Fetch batches by `engine` from index lists that may outlive the epoch.

    Args:
        loader: map-style loader whose samplers, collate function and worker_init_fn are used.
        engine: makes the batches.
        strict, whole: see `AheadCheck`.

    Attributes:
        failed_guesses: how often the next epoch was prefetched in vain.
        base_seed: of the random numbers in the running epoch.
        served: number of the next batch in the running epoch.
        sampler_error: raised by the sampler.
    """

    whole_epochs = False  # True if batches depend on those before, so that a pass can't be taken over within an epoch
    _errors_wait = True  # Whether what a sampler raises comes after the batches of the lists that it has yielded
    _fills_early_from = 2  # capacity at which the next index list is drawn before a batch is handed over

    def __init__(self, loader: DataLoader[Any], engine: Engine, *, strict: bool = False, whole: bool = False) -> None:
        self.loader, self.engine = loader, engine
        self.check = AheadCheck(loader, strict=strict, whole=whole, seeded=isinstance(engine, InlineEngine))
        self.failed_guesses = self._wrong = 0
        self._seeded = loader.worker_init_fn is None
        self._ended = self._feeding = self._all_drawn = False
        self._draws, self._live = Draws(loader, iter(())), LiveSampler(loader)
        self._source: Iterator[BatchJob] = iter(())
        # Jobs that were drawn and not served, oldest first; of the running epoch, then of the next one.
        self._record: deque[BatchJob] = deque()
        self._given = 0  # so many of them the engine has
        self._failed = False  # the oldest could not be made
        self.sampler_error: Exception | None = None
        self._epoch = self.served = self.base_seed = 0
        self._may_look_ahead = True
        self._ahead: Ahead | None = None
        self._resumed: Ahead | None = None
        # States of the loader's own generators: after all that was drawn in this epoch, and after what was drawn for
        # the batches served.
        self._drawn: States = []
        self._after: States = []
        self._epoch_step = 1
        self._begun_at: int | None = None
        self._fetch = fetch_of(loader)
        self._sent: DatasetSnapshot = take_snapshot(self._fetch)
        self._began: DatasetSnapshot | None = None
        self._forecast = Forecast(self._fetch)
        # The last snapshot sent to each engine's copies; one that has not started copies the dataset as it is then.
        self._states: weakref.WeakKeyDictionary[Engine, DatasetSnapshot] = weakref.WeakKeyDictionary()
        self._made_in: weakref.WeakKeyDictionary[Engine, int] = weakref.WeakKeyDictionary()  # epoch
        # For `mend`: what is in progress, and how to undo it.
        self.broken = False
        self._recent: deque[tuple[BatchJob, States]] = deque(maxlen=_RECENT)
        self._drawing: States | None = None
        self._real: tuple[States, int | None] | None = None

    # -- one epoch ---------------------------------------------------------------------------------------------------

    @mended
    def take(self, indices: Iterator[Any], *, base_seed: int = 0, first: int = 0, ahead: bool = True) -> None:
        """Begin to feed the engine from `indices`, the index lists that are still to come in the running epoch.

        Args:
            indices: the index lists; drawn from at most `engine.capacity` batches early.
            base_seed: of the random numbers in this epoch.
            first: number of the first list in its epoch.
            ahead: go on with the next epoch at its end, if that can be drawn ahead.
        """
        self.drop()
        self._note_epoch(first, self._snapshot())
        self._refresh(self._epoch + 1)
        self.served = first
        self._feed(indices, base_seed)
        self.check.switched()
        self._may_look_ahead = ahead and self._wrong < _MOST_WRONG

    def _feed(self, indices: Iterator[Any], base_seed: int) -> None:
        self._epoch += 1
        self._draws, self._live = draws, _ = Draws(self.loader, indices), LiveSampler(self.loader)
        self._source = self._jobs(draws, base_seed, self._epoch, self.served)
        self.base_seed = self.engine.base_seed = base_seed
        self._ahead, self._resumed, self._all_drawn = None, None, False
        self._drawn = self._after = draws.generators()
        self._ended, self._feeding = False, True

    @mended
    def prime(self) -> None:
        """Draw the first index lists and hand them to the engine, as a loader with workers does when a pass begins."""
        self._start()
        self._fill()

    @mended
    def fetch(self) -> Any:
        """Return the next batch of the running epoch; raises StopIteration at its end or when drained.

        After an Exception the batch is passed over, unless another engine is switched to, which makes it again.
        """
        self.skip_failed()
        if self._resumed is not None:
            self._start()
        self._follow_sampler()
        self.check.refuse(drawn_since=not self._ended and not same(self._draws.generators(), self._drawn))
        self._fill()
        if not self._record or self._record[0].epoch != self._epoch:
            self._ended = True
            raise StopIteration
        if self.check.is_stale(self._record[0].indices):
            self._renew()
        try:
            batch = self.engine.collect()
        except ours():
            self._given, self._failed = self._given - 1, True
            raise
        self._given -= 1
        self.check.compare(self._record[0], batch)
        self._pop()
        if self.engine.capacity >= self._fills_early_from:
            self._fill_early()
        return batch

    def _follow_sampler(self) -> None:
        """Have the lists that were drawn early be those that the sampler would yield now, if the loop has set it."""
        drawn = [job for job in self._record if job.epoch == self._epoch]
        if not drawn or self.whole_epochs or not self._live.changed():
            return
        self._take_back()
        lists = lists_left(self._live, self._draws.lists, drawn, iter(()) if self._all_drawn else self._source)
        source = self._jobs(self._draws, self.base_seed, self._epoch, self.served)
        self._record, self._draws.lists, self._source, self._all_drawn = deque(), lists, source, False
        self._live = LiveSampler(self.loader)

    def _renew(self) -> None:
        """Make anew what was made ahead: the loop has changed the dataset within the epoch."""
        self._take_back()
        self._began = take_snapshot(self._fetch)  # another collate function counts from the next epoch on
        self._look()
        if not compare(self._sent, self._began):  # a change that a snapshot doesn't show
            self.engine.restart()
        self._refresh(self._epoch)
        self._give()

    def _pop(self) -> None:
        job = self._record[0]
        self._recent.append((job, self._after))
        self._record.popleft()
        self.served, self._after = job.number + 1, job.after

    def skip_failed(self) -> None:
        """Pass over the batch that could not be made, if there is one."""
        if self._failed:
            self._pop()
            self._failed = False

    def give_back(self, handed: int) -> None:
        """Make the batches from number `handed` on again: an interruption kept them from reaching the loop."""
        self.broken = True
        self.mend(handed)

    @property
    def feeding(self) -> bool:
        """True until `close_feed`."""
        return self._feeding

    def close_feed(self) -> None:
        """Draw no more indices: `fetch` then returns what is under way in this epoch and ends."""
        self._feeding = False
        self._ahead = None

    @mended
    def left(self) -> Iterator[Any]:
        """Return the index lists of this epoch that have not been served: those under way, then the rest.

        For going on without the engine, after a failure or when it is drained.
        """
        drawn, later = self._parts_left()
        return lists_left(None if self.whole_epochs else self._live, self._draws.lists, drawn, later)

    @mended
    def jobs_left(self) -> Iterator[BatchJob]:
        """Return `left` with the seeds."""
        return itertools.chain(*self._parts_left())

    def _parts_left(self) -> tuple[Iterable[BatchJob], Iterator[BatchJob]]:
        if self._resumed is not None:
            self._redraw()
        pending = [job for job in self._record if job.epoch == self._epoch]
        later, drawn = iter(()) if self._all_drawn else self._source, self._drawn
        open_end = self._feeding and not self._ended
        if open_end:
            self._put_back()
        self._drawn = self._after  # what is not put back counts as drawn
        self.close_feed()
        return (AsDrawn(self._draws, pending, self._after, drawn) if open_end else pending), later

    @mended
    def leave(self) -> None:
        """Have generators be as the batches that were served had left them: the loop has left the epoch."""
        self._put_back()

    def _put_back(self) -> None:
        if self._drawn and not self._ended:
            self._draws.put_back(self._drawn, self._after)
            self._drawn = self._after  # once: an older pass may draw what leads to the same state

    @mended
    def drop(self) -> None:
        """Forget what is under way; generators go back to where the batches that were served had left them."""
        self._put_back()
        self.close_feed()
        if self._given:
            self.engine.discard()
        self._record.clear()
        self._given, self._failed, self._resumed = 0, False, None

    def know(self, engine: Engine) -> None:
        """Record that an engine's copies of the dataset have just been made."""
        self._states[engine], self._made_in[engine] = self._snapshot(), self._epoch + 1

    def close(self) -> None:
        """Give up the engine's threads and processes; the next `take` starts them anew."""
        self.drop()
        self.engine.close()

    @mended
    def switch(self, engine: Engine) -> None:
        """Go on with another engine from the next batch on; what is under way is made again by it."""
        if engine is self.engine:
            return
        self._take_back()  # the next epoch too, drawn under a state of the dataset that the other engine does not have
        self._failed = False
        self._states[self.engine] = self._sent
        self.engine = engine
        self._sent = self._states.get(engine, self._sent)
        self._began = self._snapshot()
        self._look()
        self._refresh(self._epoch)

    @mended
    def renew_copies(self) -> None:
        """Have the engine's processes, if it has any, started anew for the next batch."""
        self._take_back()
        self.engine.restart()
        self._sent = self._snapshot()

    def _take_back(self) -> None:
        """Have the engine forget what is under way; it gets those of this epoch again."""
        self._forget_ahead()
        self.engine.discard()
        self._given = 0

    def _forget_ahead(self) -> None:
        if any(job.epoch != self._epoch for job in self._record):
            self._record = deque(job for job in self._record if job.epoch == self._epoch)
        self._ahead = None
        if self._all_drawn:
            self._source = iter(())

    def mend(self, handed: int | None = None) -> None:
        """Put in order what an interruption left half done.

        Args:
            handed: number of the first batch that the loop has not got; None for the first in the record.
        """
        self.engine.reset()  # first: a thread that still fetches could put back states that are restored below
        self._draws.mend()
        if self._ahead is not None:
            self._ahead.draws.mend()
        if self._real is not None:
            states, epoch = self._real
            epochs.restore(self.loader, states)
            if epoch is not None:
                epochs.set_epoch(self.loader, epoch)
            self._real = None
        if self._drawing is not None:
            self._draws.restore(self._drawing)
            self._drawn, self._source, self._drawing = self._drawing, NoMoreLists(ListLost()), None
        for job, after in reversed(self._recent) if handed is not None else ():
            if job.epoch == self._epoch and job.number >= handed:
                if all(job is not other for other in self._record):
                    self._record.appendleft(job)
                self.served, self._after = job.number, after
        self._given, self._failed = 0, False
        self._forget_ahead()
        self._may_look_ahead = False
        self._sent = self._began = self._snapshot()
        self.broken = False

    # -- the epoch after ---------------------------------------------------------------------------------------------

    @mended
    def resume(self) -> bool:
        """Go on with the epoch drawn ahead, if it is what the loader would draw now; return whether it is.

        On success the random states are advanced exactly as beginning the plain loader's epoch would have.
        """
        ahead = self._ahead
        current = bool(self._record) and self._record[0].epoch == self._epoch
        if ahead is None or current or not (self._ended or same(self._drawn, self._after)):
            # Nothing drawn ahead, or the loop left the epoch before its last batch; or with it, but without asking for
            # one more, which is when the sampler would have drawn once more.
            return False
        undisturbed = same_draws(self.loader, ahead)
        present = epoch_of(self.loader), epochs.lengths(self.loader), epochs.settings(self.loader)
        as_expected = present == (ahead.epoch, ahead.lengths, ahead.settings) and ahead.peeked.holds()
        now = self._snapshot()
        if not (undisturbed and as_expected) or not now.whole or compare(self._sent, now):
            self.failed_guesses += 1
            # A loop that draws random numbers of its own between the two will do so again; epochs can be learnt.
            self._wrong += 1 if undisturbed else _MOST_WRONG
            return False
        self._wrong = 0
        self._note_epoch(0, now)
        self._refresh(self._epoch + 1)
        self._real = capture(self.loader), None
        epochs.begin_ahead(self.loader, ahead)
        ahead.peeked.begin()
        self._real = None
        self._begin(ahead)
        return True

    def _begin(self, ahead: Ahead) -> None:
        """Make the epoch drawn ahead the running one; its lists count once the first batch is asked for."""
        self._epoch += 1
        self._ahead, self._resumed, self._all_drawn = None, ahead, False
        self.base_seed = self.engine.base_seed = ahead.base_seed
        self._draws, self._ended, self.served, self._live = ahead.draws, False, 0, LiveSampler(self.loader)
        self._drawn, self._after = ahead.draws.generators(), ahead.began[1:]
        self._may_look_ahead = True

    def _start(self) -> None:
        """Have the lists that were drawn ahead count, unless the loop drew something since the epoch began."""
        ahead = self._resumed
        if ahead is None:
            return
        if same(capture(self.loader), ahead.began):
            self._real = ahead.began, None
            ahead.draws.begin()
            self._real = None
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

    # -- inside ------------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        if self._record:
            self._give()
        while self._feeding and len(self._record) < self.engine.capacity:
            try:
                drawn = self._draw()
            except ours():
                if self._errors_wait and (self._record or self._ahead is not None):
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
            if not self._errors_wait:
                raise  # else it is raised again when the next batch is asked for, and not in place of the one in hand

    def _give(self) -> None:
        most = min(len(self._record), self.engine.capacity)
        while self._given < most:
            job = self._record[self._given]
            self.engine.submit(job._replace(watch=self.check.watch) if self.check.strict else job)
            self._given += 1

    def _draw(self) -> bool:
        """Take the next index list into the record; return whether there was one."""
        if self._all_drawn and self._ahead is None:
            return False
        if self._ahead is None:
            self._drawing = self._drawn
        try:
            job = next(self._source, None)
        except ours() as error:
            self.sampler_error, self._drawing = error, None
            if self._errors_wait:
                self._source = NoMoreLists(error)
            raise
        if job is not None:
            self._record.append(job)
            if self._ahead is None:
                self._drawn = job.after
        elif self._ahead is None:
            self._drawn, self._all_drawn = self._draws.generators(), True
        self._drawing = None
        return job is not None

    def _look_ahead(self) -> bool:
        """Draw the next epoch's index lists, when this one's have all been given out."""
        if self._ahead is not None or not self._may_look_ahead or self.engine.capacity < 2:
            return False  # one epoch ahead is enough: the look-ahead is bounded in batches
        self._may_look_ahead = False  # once in an epoch
        if not self._sent.whole:
            return False  # what can't be seen may change before the next epoch begins
        expected = self._forecast.next(self._sent)
        leaves = compare(self._sent, expected).leaves
        view = self._forecast.view(self._fetch, expected) if leaves and not self.engine.copies else None
        if leaves and not self.engine.copies and view is None:
            return False  # made now, the batches would be those of this epoch's dataset
        seeded = self.base_seed if epochs.persistent(self.loader) else None
        self._real = capture(self.loader), epoch_of(self.loader)
        self._ahead = draw_ahead(self.loader, step=self._epoch_step, seeded=seeded)
        self._real = None
        if self._ahead is None:
            return False
        if leaves:
            self.engine.update(leaves)
        self._sent = expected
        self._source = self._jobs(self._ahead.draws, self._ahead.base_seed, self._epoch + 1, dataset=view)
        return True

    def _jobs(self, draws: Draws, base_seed: int, epoch: int, first: int = 0, dataset: Any = None) -> Jobs:
        return Jobs(draws, base_seed if self._seeded else None, epoch, first, dataset)

    def _snapshot(self) -> DatasetSnapshot:
        self._fetch.collate = self.loader.collate_fn  # which the user may have changed
        return take_snapshot(self._fetch)

    def _note_epoch(self, first: int, now: DatasetSnapshot) -> None:
        """Learn how the sampler's epoch and the dataset move from one epoch to the next."""
        epoch = epoch_of(self.loader)
        if not first and self._began is not None:
            self._forecast.saw(self._began, now)
        # After an early break some samplers stay where they are: this says nothing about the end of an epoch.
        if not first and self._ended and epoch is not None and self._begun_at is not None:
            self._epoch_step = epoch - self._begun_at
        self._began, self._begun_at = now, epoch
        self._look()

    def _look(self) -> None:
        self.check.look(None if isinstance(self.engine, InlineEngine) else self._fetch)

    def _refresh(self, epoch: int) -> None:
        """Bring the engine's copies of the dataset to its present state, as `epoch` begins or goes on."""
        assert self._began is not None
        change = compare(self._sent, self._began)
        # What can't be seen may have changed: then workers last as long as those of a plain loader.
        renewed = epochs.persistent(self.loader) or self._made_in.get(self.engine) == epoch
        unseen = not self._began.whole and not renewed
        if unseen or (change and not change.sendable):
            self.engine.restart()
            self._made_in[self.engine] = epoch
        elif change:
            self.engine.update(change.leaves)
        self._sent = self._began
