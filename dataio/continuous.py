"""Keep an engine busy with the batches of the running epoch, and with those of the next one before it is asked for.

The index lists come from the loader's own samplers, in their order. At most `engine.capacity` of them are drawn before
their batch is asked for; at the end of an epoch they come from the next one (accel.dataio.epochs). The engine then goes
on making batches while the loop validates, saves, or prints. What was fetched ahead is used only if it is what the
plain loader would have made: the random states, the sampler's epoch and the dataset are compared when the next epoch
begins. If it isn't, it is thrown away.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from accel.dataio.engine import Engine, Job
from accel.dataio.epochs import Ahead, Draws, States, draw_ahead, epoch_of, put_back, same, same_draws
from accel.dataio.mirror import Forecast, State, compare, state_of
from accel.dataio.randomness import derived_seed

# Wrong guesses in a row, after which the next epoch is not guessed any more.
_MOST_WRONG = 3


# No method: a generator that held the object would keep it, and its processes, until the cycle collector comes.
def _jobs(draws: Draws, base_seed: int | None, first: int = 0, dataset: Any = None) -> Iterator[Job]:
    """Yield a job for each index list; `first` is the number of the first one in its epoch."""
    for number, indices in enumerate(draws, first):
        seed = None if base_seed is None else derived_seed(base_seed, number)
        yield Job(indices, seed, draws.generators(), dataset)


class Continuous:
    """Fetch batches by `engine` from index lists that may outlive the epoch.

    Args:
        loader: map-style loader whose samplers, collate function and worker_init_fn are used.
        engine: makes the batches.

    Attributes:
        failed_guesses: times the next epoch was fetched ahead in vain.
        base_seed: of the random numbers in the running epoch.
    """

    def __init__(self, loader: DataLoader[Any], engine: Engine) -> None:
        self.loader, self.engine = loader, engine
        self.failed_guesses = 0
        self._seeded = loader.worker_init_fn is None
        self._wrong = 0
        self._ended = False
        self._draws = Draws(loader, iter(()))
        self._source: Iterator[Job] = iter(())
        self._feeding = False
        self._under_way: deque[Job] = deque()
        self._failed: list[Job] = []
        self._fed = self._served = 0
        self._end_of_epoch: int | None = None
        self._may_look_ahead = True
        self._ahead: Ahead | None = None
        self.base_seed = 0
        # States of the loader's own generators: after all that was drawn in this epoch, and after what was drawn for
        # the batches served.
        self._drawn: States = []
        self._after: States = []
        self._epoch_step = 1
        self._begun_at: int | None = None
        self._sent: State = state_of(loader.dataset)
        self._began: State | None = None
        self._forecast = Forecast(loader.dataset)
        # What each engine's copies of the dataset were last told; one that has not begun takes it as it is then.
        self._states: dict[int, State] = {}

    # -- one epoch ---------------------------------------------------------------------------------------------------

    def take(self, indices: Iterator[Any], *, base_seed: int = 0, first: int = 0, ahead: bool = True) -> None:
        """Begin to feed the engine from `indices`, the index lists that are still to come in the running epoch.

        Args:
            indices: the index lists; drawn from at most `engine.capacity` batches early.
            base_seed: of the random numbers in this epoch.
            first: number of the first list in its epoch.
            ahead: go on with the next epoch at its end, if that can be foreseen.
        """
        self.drop()
        self._note_epoch(first)
        self._refresh()
        self._draws = draws = Draws(self.loader, indices)
        self._source, self._feeding = _jobs(draws, base_seed if self._seeded else None, first), True
        self.base_seed = self.engine.base_seed = base_seed
        self._ahead, self._end_of_epoch = None, None
        self._fed = self._served = 0
        self._ended = False
        self._drawn = self._after = draws.generators()
        self._may_look_ahead = ahead and self._wrong < _MOST_WRONG

    def fetch(self) -> Any:
        """Return the next batch of the running epoch; raises StopIteration at its end or when drained."""
        self._fill()
        if self._served == self._end_of_epoch or not self._under_way:
            self._ended = True
            raise StopIteration
        job = self._under_way.popleft()
        self._failed = [job]
        batch = self.engine.collect()
        self._failed = []
        self._served += 1
        self._after = job.after
        self._fill()
        return batch

    def retry_failed(self) -> None:
        """Put the batch that could not be fetched back in its place."""
        self._under_way.extendleft(self._failed)
        self._failed = []

    def skip_failed(self) -> None:
        """Count the batch that could not be fetched as served."""
        self._served += len(self._failed)
        self._failed = []

    @property
    def feeding(self) -> bool:
        """True until `close_feed`."""
        return self._feeding

    def close_feed(self) -> None:
        """Draw no more indices: `fetch` then returns what is under way in this epoch and ends."""
        self._feeding = False
        self._ahead = None

    def left(self) -> Iterator[Any]:
        """Return the index lists of this epoch that have not been served: those under way, then the rest.

        For going on without the engine, after a failure or when it is drained.
        """
        return (job.indices for job in self.jobs_left())

    def jobs_left(self) -> Iterator[Job]:
        """Return `left` with the seeds."""
        self.close_feed()
        pending = [*self._failed, *self._under_way]
        if self._end_of_epoch is not None:
            return iter(pending[: self._end_of_epoch - self._served])
        return itertools.chain(pending, self._source)

    def drop(self) -> None:
        """Forget what is under way; generators go back to where the batches that were served had left them."""
        left_early = self._feeding and not self._ended
        self.close_feed()
        if left_early:
            put_back(self.loader, self._drawn, self._after)
        if self._under_way:
            self.engine.discard()
        self._under_way.clear()
        self._failed = []

    def close(self) -> None:
        """Give up the engine's threads and processes; the next `take` starts them anew."""
        self.drop()
        self.engine.close()

    def switch(self, engine: Engine) -> None:
        """Go on with another engine from the next batch on; what is under way is made again by it."""
        if engine is self.engine:
            return
        under_way = list(self._under_way)
        if self._ahead is not None:
            # Drawn under an expected state of the dataset, which the other engine has not heard of.
            assert self._end_of_epoch is not None
            del under_way[self._end_of_epoch - self._served :]
            self._ahead, self._source = None, iter(())
        self.engine.discard()
        self._under_way.clear()
        self._fed -= len(under_way)
        self._source = itertools.chain(under_way, self._source)
        self._states[id(self.engine)] = self._sent
        self.engine = engine
        self._sent = self._states.get(id(engine), self._sent)
        self._began = state_of(self.loader.dataset)
        self._refresh()

    # -- the epoch after ---------------------------------------------------------------------------------------------

    def resume(self) -> bool:
        """Go on with the epoch drawn ahead, if it is what the loader would draw now; tell whether it is.

        On success the random states are advanced exactly as starting the plain loader's epoch would have.
        """
        ahead = self._ahead
        if ahead is None or self._served != self._end_of_epoch or not (self._ended or same(self._drawn, self._after)):
            # Nothing drawn ahead, or the loop left the epoch before its last batch; or with it, but without asking for
            # one more, which is when the sampler would have drawn once more.
            return False
        self._ahead = None
        undisturbed = same_draws(self.loader, ahead)
        as_expected = epoch_of(self.loader) == ahead.epoch and ahead.foreseen.holds()
        if not (undisturbed and as_expected) or compare(self._sent, state_of(self.loader.dataset)):
            self.failed_guesses += 1
            # A loop that draws random numbers of its own between the two will do so again; epochs can be learnt.
            self._wrong += 1 if undisturbed else _MOST_WRONG
            return False
        self._wrong = 0
        self._note_epoch(0)
        self._refresh()
        ahead.draws.begin()
        ahead.foreseen.begin()
        self._fed -= self._served
        self._served, self._end_of_epoch = 0, None
        self.base_seed = self.engine.base_seed = ahead.base_seed
        self._draws, self._ended = ahead.draws, False
        self._drawn = ahead.draws.generators()
        self._after = ahead.began
        return True

    # -- inside ------------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        while self._feeding and len(self._under_way) < self.engine.capacity:
            job = next(self._source, None)
            if job is not None:
                self._fed += 1
                if self._ahead is None:
                    self._drawn = job.after
                self._under_way.append(job)
                self.engine.submit(job)
            elif not self._look_ahead():
                return

    def _look_ahead(self) -> bool:
        """Draw the next epoch's index lists, when this one's have all been given out."""
        if self._end_of_epoch is not None:
            return False  # one epoch ahead is enough: the look-ahead is bounded in batches
        self._end_of_epoch = self._fed
        self._drawn = self._draws.generators()
        if not self._may_look_ahead or self.engine.capacity < 2:
            return False
        expected = self._forecast.next(self._sent)
        leaves = compare(self._sent, expected).leaves
        view = self._forecast.view(self.loader.dataset, expected) if leaves and not self.engine.copies else None
        if leaves and not self.engine.copies and view is None:
            return False  # made now, the batches would be those of this epoch's dataset
        persistent = self.loader.num_workers > 0 and self.loader.persistent_workers
        self._ahead = draw_ahead(self.loader, step=self._epoch_step, seeded=self.base_seed if persistent else None)
        if self._ahead is None:
            return False
        if leaves:
            self.engine.update(leaves)
        self._sent = expected
        self._source = _jobs(self._ahead.draws, self._ahead.base_seed if self._seeded else None, dataset=view)
        return True

    def _note_epoch(self, first: int) -> None:
        """Learn how the sampler's epoch and the dataset move from one epoch to the next."""
        now, epoch = state_of(self.loader.dataset), epoch_of(self.loader)
        if not first and self._began is not None:
            self._forecast.saw(self._began, now)
        # After an early break some samplers stay where they are: that tells nothing of the end of an epoch.
        if not first and self._ended and epoch is not None and self._begun_at is not None:
            self._epoch_step = epoch - self._begun_at
        self._began, self._begun_at = now, epoch

    def _refresh(self) -> None:
        """Bring the engine's copies of the dataset to its present state."""
        assert self._began is not None
        change = compare(self._sent, self._began)
        if change and change.sendable:
            self.engine.update(change.leaves)
        elif change:
            self.engine.restart()
        self._sent = self._began
