"""One pass over a loader, as an iterator: by an engine that makes batches ahead, and at any batch without it.

An engine makes the batches of one pass at a time, the newest. When another pass begins, when the engine fails or is no
longer wanted, the pass goes on by an iterator that makes the rest of its epoch. What that is, the maker says:

| maker | who decides | the rest is made by |
|---|---|---|
| `loader_core.LoaderCore` | the user, or the tuner | the loop's own thread |
| `proxy.Controlled` | the controller, between two batches | torch's iterator, given the index lists that are left |
| the same, with `own_workers.OwnWorkers` | the controller, between two epochs | torch's iterator, begun again |
"""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from accel.dataio.engine.engine import BatchJob, InlineEngine
from accel.dataio.engine.transfer import AheadCopier
from accel.dataio.passes.continuous import Continuous


class Maker(ABC):
    """What decides by what the batches of a pass are made."""

    @abstractmethod
    def begin(self, running: Pass) -> None:
        """Begin the epoch: attach an engine, or set the iterator that makes it."""

    @abstractmethod
    def fetch(self, running: Pass) -> Any:
        """Return the next batch, by another engine if that is wanted; raises StopIteration at the end of the feed."""

    def failed(self, running: Pass, error: Exception) -> bool:
        """Have the pass go on without the engine, which raised; return False if the error is the loop's."""
        return False


class Pass:
    """One pass over a loader, as an iterator.

    Args:
        maker: decides by what the batches are made.
        copier: copies each batch to the device while the one before it is used; None to leave batches where they are.

    Attributes:
        position: number of the next batch in the epoch.
        continuous: makes the batches ahead; None while `rest` does.
        rest: the batches that are left, when they are not made ahead.
    """

    def __init__(self, maker: Maker, copier: AheadCopier | None = None) -> None:
        self._maker, self._copier = maker, copier
        self._late: Exception | None = None
        self.position = 0
        self.continuous: Continuous | None = None
        self.rest: Iterator[Any] = iter(())
        maker.begin(self)

    def attach(self, continuous: Continuous, go_on: Callable[[Pass, Continuous], Iterator[Any]]) -> None:
        """Have `continuous` make the batches from now on, and `go_on` return what makes the rest without it."""
        self.continuous, self._go_on = continuous, go_on

    def detach(self) -> None:
        """Go on without the engine, if there is one."""
        if self.continuous is not None:
            self.rest = self._go_on(self, self.continuous)
            self.continuous = None

    def __del__(self) -> None:
        continuous = self.__dict__.get("continuous")
        if continuous is not None and not sys.is_finalizing():
            continuous.leave()

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        position = self.position
        try:
            batch = self._fetch() if self._copier is None else self._copied(self._copier)
            self._stand_at(position + 1 if self.continuous is None else self._reached)
            return batch
        except StopIteration:
            self._end()
            raise
        except Exception:
            raise
        except BaseException:
            self.give_back(position)
            raise

    def give_back(self, position: int) -> None:
        """Make the batches from number `position` on again: an interruption kept them from reaching the loop."""
        if self._copier is not None:
            self._copier, self._late = AheadCopier(self._copier.device), None
        if self.continuous is None:
            return
        self.continuous.give_back(position)
        self._stand_at(position)
        if self.continuous.whole_epochs:
            self.detach()

    def _fetch(self) -> Any:
        try:
            return self._maker.fetch(self)
        except StopIteration:
            if self.continuous is None or self.continuous.feeding:
                raise
            self.detach()  # the engine was drained
        except Exception as error:
            if self.continuous is None or not self._maker.failed(self, error):
                self._pass_over()
                raise
        return self._fetch()

    def _pass_over(self) -> None:
        """Leave out the batch that could not be made."""
        if self.continuous is not None:
            self.continuous.skip_failed()
        self._stand_at(self.position + 1 if self.continuous is None else self._reached)

    def _stand_at(self, position: int) -> None:
        self.position = position

    def _end(self) -> None:
        self.continuous, self.rest = None, iter(())  # a newer pass has nothing to detach, and keeps what is made ahead

    @property
    def _reached(self) -> int:
        """Number of the next batch to be handed over; those before it, whose copy is under way, were fetched."""
        assert self.continuous is not None
        return self.continuous.served - (0 if self._copier is None else len(self._copier))

    def _copied(self, copier: AheadCopier) -> Any:
        """Return the batch whose copy was begun before, and begin that of the next one."""
        if not len(copier):
            if self._late is not None:
                late, self._late = self._late, None
                raise late
            copier.start(self._fetch())
        try:
            copier.start(self._fetch())
        except Exception as error:  # the end too: it comes after the batch in hand
            self._late = error
        return copier.finish()


class Newest:
    """The newest of the passes over a loader: the only one whose batches are made ahead."""

    def __init__(self) -> None:
        self._pass: weakref.ref[Pass] | None = None

    def is_(self, running: Pass) -> bool:
        """Return whether `running` is the newest."""
        return self._pass is not None and self._pass() is running

    def begin(self, newer: Pass) -> None:
        """Have an older pass that is still under way, as in nested loops, go on without the engine."""
        self.detach()
        self._pass = weakref.ref(newer)

    def detach(self) -> None:
        """Have the newest go on without the engine, too."""
        running = None if self._pass is None else self._pass()
        if running is not None:
            running.detach()

    def forget(self) -> None:
        """Have none be the newest."""
        self.detach()
        self._pass = None


class InlineRest:
    """The rest of an epoch, made in the loop's own thread.

    Args:
        running: pass whose rest it is.
        continuous: has made its batches so far.
    """

    def __init__(self, running: Pass, continuous: Continuous) -> None:
        self._engine, self._jobs = InlineEngine(continuous.loader), continuous.jobs_left()
        self._job: BatchJob | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._job is None:
            self._job = next(self._jobs)
        try:
            self._engine.submit(self._job)
            batch = self._engine.collect()
        except Exception:
            self._job = None
            raise
        except BaseException:
            self._engine.reset()
            raise
        self._job = None
        return batch


class Skipping:
    """An iterator without its first batches, which are made and thrown away when one is asked for.

    Args:
        begin: returns the whole iterator.
        count: batches to leave out.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]], count: int) -> None:
        self._begin, self._left = begin, count
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._begin()
        while self._left:
            next(self._batches)
            self._left -= 1
        return next(self._batches)
