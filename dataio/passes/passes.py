"""One pass over a loader, as an iterator: its batches are prefetched by an engine, or come from a plain iterator.

An engine works for one pass at a time, the newest. When a newer pass begins, when the engine fails
or is no longer wanted, the pass is detached: another iterator makes the rest of its epoch. For
`ContinuousLoader` that is the loop's own thread, under the controller torch's iterator, given the
lists that are left.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accel.profiler.interruptions import ours

if TYPE_CHECKING:
    from accel.dataio.engine.transfer import AheadCopier
    from accel.dataio.passes.prefetch import PrefetchAcrossEpochs


class EpochIterator(ABC):
    """One pass over a loader, as an iterator; it decides which engine makes the batches.

    `position` is the number of the next batch; `continuous` prefetches them, and while that is None
    `rest` yields them.
    """

    def __init__(self, copier: AheadCopier | None = None) -> None:
        self._copier = copier
        self._late: Exception | None = None
        self.position = 0
        self.continuous: PrefetchAcrossEpochs | None = None
        self.rest: Iterator[Any] = iter(())
        try:
            self._begin()
        except ours():
            raise
        except BaseException:
            self._throw_away()
            raise

    def _throw_away(self) -> None:
        if self.continuous is not None:
            self.continuous.interrupted()

    @abstractmethod
    def _begin(self) -> None:
        """Begin the epoch: set `continuous` or `rest`."""

    @abstractmethod
    def _batch(self) -> Any:
        """Return the next batch, after switching engines if need be; raises StopIteration when there is none."""

    @abstractmethod
    def _rest_of(self, continuous: PrefetchAcrossEpochs) -> Iterator[Any]:
        """Return what goes on where an engine has come to."""

    def _failed(self, error: Exception) -> bool:
        """Detach the pass from an engine that raised and return True; return False if the loop is to get the error."""
        return False

    def give_back(self, position: int) -> None:
        """Make the batches from number `position` on without the engine: an interruption kept them from the loop."""
        if self.continuous is not None:
            if self._copier is not None:
                self._copier, self._late = type(self._copier)(self._copier.device), None
            self._stand_at(position)
            self._throw_away()
            self.detach()

    def detach(self) -> None:
        """Go on without the engine, if one is attached."""
        if self.continuous is not None:
            self.rest = self._rest_of(self.continuous)
            self.continuous = None

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        position = self.position
        try:
            batch = self._fetch() if self._copier is None else self._copied(self._copier)
            self._stand_at(self.position + 1 if self.continuous is None else self._reached)
            return batch
        except StopIteration:
            self._end()
            raise
        except ours():
            raise
        except BaseException:
            self.give_back(position)
            raise

    def _fetch(self) -> Any:
        try:
            return self._batch()
        except StopIteration:
            if self.continuous is None or self.continuous.epoch.feeding:
                raise
            self.detach()  # the engine was drained
        except ours() as error:
            if self.continuous is None or not self._failed(error):
                if self.continuous is not None:  # the batch that could not be made is passed over
                    self.continuous.epoch.move_on()
                self._stand_at(self.position + 1 if self.continuous is None else self._reached)
                raise
        return self._fetch()

    def _stand_at(self, position: int) -> None:
        self.position = position
        if self.continuous is not None:
            self.continuous.epoch.handed = position

    def _end(self) -> None:
        self.continuous, self.rest = None, iter(())  # a newer pass has nothing to detach, and keeps what is made ahead

    @property
    def _reached(self) -> int:
        """Number of the next batch to be handed over; those before it, whose copy is under way, were fetched."""
        assert self.continuous is not None
        return self.continuous.epoch.served - (0 if self._copier is None else len(self._copier))

    def _copied(self, copier: AheadCopier) -> Any:
        """Return the batch whose copy was begun before, and begin that of the next one."""
        if not len(copier):
            if self._late is not None:
                late, self._late = self._late, None
                raise late
            copier.start(self._fetch())
        if copier.holds_graph:  # the next one is computed with the weights after this step
            return copier.finish()
        try:
            copier.start(self._fetch())
        except StopIteration as end:  # with its frames it would keep this pass alive, which the loop may have left
            self._late = end.with_traceback(None)
        except ours() as error:
            self._late = error
        return copier.finish()


class ActiveIterator:
    """The newest of the passes over a loader: the only one whose batches are prefetched."""

    def __init__(self) -> None:
        self._pass: weakref.ref[EpochIterator] | None = None

    def is_(self, running: EpochIterator) -> bool:
        return self._pass is not None and self._pass() is running

    def begin(self, newer: EpochIterator) -> None:
        """Make `newer` the newest, and detach the one before, which may go on, as in nested loops."""
        self.detach()
        self._pass = weakref.ref(newer)

    def detach(self) -> None:
        running = None if self._pass is None else self._pass()
        if running is not None:
            running.detach()

    def forget(self) -> None:
        """Detach the newest, and have none."""
        self.detach()
        self._pass = None


class InlineRest:
    """The rest of a pass that `continuous` has begun, made in the loop's own thread."""

    def __init__(self, continuous: PrefetchAcrossEpochs) -> None:
        from accel.dataio.engine.engine import InlineEngine  # seldom: for a pass that engines have begun

        self._engine, self._left = InlineEngine(continuous.loader), continuous.left()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        # A job whose batch was interrupted is the engine's still.
        if not self._engine.jobs and not self._left.next_job(self._engine.submit):
            raise StopIteration
        return self._engine.collect()
