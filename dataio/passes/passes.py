"""One pass over a continuous loader after the other: who iterates, and what is done when a setting fails."""

from __future__ import annotations

import logging
import math
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch

from accel.dataio.dataset.fetch_watch import FetchWatch
from accel.dataio.engine import transfer
from accel.dataio.engine.engine import (
    BatchJob,
    FetchTimeout,
    InlineEngine,
    ThreadsDraw,
    WorkerDied,
    WorkersStuck,
)
from accel.dataio.passes.continuous import Continuous
from accel.dataio.passes.loader_core import INLINE, LoaderCore
from accel.dataio.passes.tuner import Tuner

log = logging.getLogger("accel.dataio")

# Batches that a dataset is watched for: whether fetching changes it.
_WATCHED = 3


class _Handing(ABC):
    """An iterator that hands batches over: copied to the device one ahead, counted."""

    def __init__(self, way: LoaderCore) -> None:
        self._way = way
        self._copier = None if way.device is None else transfer.AheadCopier(way.device)
        self._late: Exception | None = None

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        batch = self._fetch() if self._copier is None else self._copied(self._copier)
        self._handed()
        return batch

    @abstractmethod
    def _fetch(self) -> Any:
        """Return the next batch."""

    def _handed(self) -> None:
        self._way.served += 1

    @property
    def _ahead(self) -> int:
        """Batches that were fetched and not handed over: their copy to the device is under way."""
        return 0 if self._copier is None else len(self._copier)

    def _copied(self, copier: transfer.AheadCopier) -> Any:
        """Return the batch whose copy was begun before, and begin that of the next one."""
        if not len(copier) and self._late is None:
            copier.start(self._fetch())
        if not len(copier):
            late, self._late = self._late, None
            assert late is not None
            if not isinstance(late, StopIteration):
                raise late
            self._way.finished = True
            self._late = late
            raise StopIteration
        if self._late is None:
            try:
                copier.start(self._fetch())
            except Exception as error:  # the end too: it comes after the batch in hand
                self._late, self._way.finished = error, False
        return copier.finish()


class Pass(_Handing):
    """One pass over the loader, as an iterator.

    Args:
        way: how batches are made.
        loader: what the loop iterates.
    """

    def __init__(self, way: LoaderCore, loader: Any) -> None:
        super().__init__(way)
        self._accel_loader = loader  # the profiler asks for it, as it does for `_workers`
        self._continuous: Continuous | None = None
        self._rest: Iterator[Any] = iter(())
        self._left_at = math.nan
        self._pins = way.loader.pin_memory and way.device is None and torch.cuda.is_available()
        self._continuous = way.begin(self)  # last: from here on the loader knows the pass, and may detach it

    @property
    def _workers(self) -> list[Any]:
        return self._way.worker_processes()

    def __del__(self) -> None:
        continuous = self.__dict__.get("_continuous")
        if continuous is not None and not sys.is_finalizing():
            continuous.leave()

    def detach(self) -> None:
        """Go on without the engine: another pass has begun, or the loader was closed."""
        if self._continuous is not None:
            self._rest = _RestOfPass(InlineEngine(self._way.loader), self._continuous.jobs_left())
            self._continuous = None

    def __next__(self) -> Any:
        handed = self._way.served
        try:
            return super().__next__()
        except Exception:
            raise
        except BaseException:
            self._interrupted(handed)
            raise

    def _interrupted(self, handed: int) -> None:
        """Have everything made again that has not reached the loop."""
        if self._copier is not None:
            self._copier, self._late = transfer.AheadCopier(self._copier.device), None
        if self._continuous is not None:
            self._continuous.give_back(handed)
            self._way.served, self._way.finished = handed, False

    def _handed(self) -> None:
        if self._continuous is not None:  # a pass that goes on beside a newer one is not the loop's place
            self._way.served = self._continuous.served - self._ahead
        self._left_at = time.perf_counter()

    def _fetch(self) -> Any:
        if self._continuous is None:
            return next(self._rest)
        try:
            batch = self._as_told() if self._way.choice is None else self._measured(self._way.choice)
        except StopIteration:
            self._way.finished = True
            raise
        except Exception:
            self._continuous.skip_failed()
            self._way.served = self._continuous.served - self._ahead
            raise
        return transfer.pin(batch) if self._pins else batch

    def _as_told(self) -> Any:
        assert self._continuous is not None
        try:
            return self._continuous.fetch()
        except (ThreadsDraw, WorkersStuck) as error:
            advice = ". Use mode='processes' for such a dataset" if isinstance(error, ThreadsDraw) else ""
            mode = self._way.options.mode
            warnings.warn(f"{error}: mode={mode!r} goes on in the loop's own thread{advice}", stacklevel=6)
            self._way.go_inline(str(error))
            return self._continuous.fetch()

    # -- choosing ----------------------------------------------------------------------------------------------------

    def _measured(self, choice: Tuner) -> Any:
        """Fetch the next batch as the choice wants it, and tell it what that took."""
        continuous, way = self._continuous, self._way
        assert continuous is not None
        if choice.current != way.setting:
            way.follow(choice)
        began, busy = time.perf_counter(), choice.busy()
        try:
            batch = continuous.fetch() if way.witness is None else self._watched(way.witness, choice)
        except (StopIteration, FetchTimeout):
            raise
        except ThreadsDraw as error:
            choice.forbid_threads(str(error))
            return self._measured(choice)
        except Exception as error:
            return self._otherwise(choice, error)
        if isinstance(continuous.engine, InlineEngine):
            way.slowest_s = max(way.slowest_s, time.perf_counter() - began)
            if continuous.engine.draws:
                choice.forbid_threads("fetching a sample draws random numbers")
        ended, changes = time.perf_counter(), choice.changes
        choice.served(ended - began, began - self._left_at, choice.busy().since(busy), continuous.engine.capacity)
        if choice.changes != changes:
            way.follow(choice)
            log.info("%s", choice.explain())
        return batch

    def _otherwise(self, choice: Tuner, error: Exception) -> Any:
        """Make the batch that a setting failed at in the loop's own thread, as a plain loader would.

        If that raises too, it is the dataset's own error and no fault of the setting.
        """
        continuous, way = self._continuous, self._way
        assert continuous is not None
        if way.setting == INLINE:
            raise error
        if isinstance(error, WorkerDied) or way.calls_init:
            # What ended two workers could end the loop's own process; another setting may do.
            choice.failed(error)
            if choice.exhausted:
                raise error
            return self._measured(choice)
        failed = choice.current
        way.go_inline("")
        batch = continuous.fetch()
        if choice.current == failed:
            choice.failed(error)
        return batch

    def _watched(self, witness: FetchWatch, choice: Tuner) -> Any:
        """Fetch one of the first batches under a witness: may threads read this dataset?"""
        continuous, way = self._continuous, self._way
        assert continuous is not None
        witness.before()
        batch = continuous.fetch()
        witness.after()
        way.moved_file = way.moved_file or witness.moved_file
        if witness.finding:
            choice.forbid_threads(witness.finding)
        if witness.finding or witness.fetches >= _WATCHED:
            way.witness = None
        return batch


class _RestOfPass:
    """What is left of a pass, made in the loop's own thread."""

    def __init__(self, engine: InlineEngine, jobs: Iterator[BatchJob]) -> None:
        self._engine, self._jobs = engine, jobs
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


class Through(_Handing):
    """One pass over a loader that is left as it is; passes over the batches that were served before."""

    def __init__(self, way: LoaderCore) -> None:
        super().__init__(way)
        loaded, way.loaded = way.loaded, None
        self._batches = iter(way.loader)
        way.finished, way.served = False, 0 if loaded is None else loaded["served"]
        for _ in range(way.served):
            next(self._batches, None)

    def _fetch(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._way.finished = True
            raise
