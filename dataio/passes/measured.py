"""Fetch each batch under the setting on trial, and report its time to the tuner."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

from accel.dataio.dataset.fetch_watch import FetchWatch
from accel.dataio.dataset.thread_safety import unsafe
from accel.dataio.engine.engine import BatchHasGraph, FetchTimeout, InlineEngine, ThreadsDraw, WorkerDied
from accel.dataio.fetching.fetch import Fetch, fetch_of
from accel.dataio.passes.engines import LoaderEngines
from accel.dataio.passes.prefetch import PrefetchAcrossEpochs
from accel.dataio.passes.rounds import INLINE
from accel.dataio.passes.tuner import LookAhead, Tuner
from accel.profiler.interruptions import ours

if TYPE_CHECKING:
    from accel.dataio.passes.loader_core import LoaderCore

log = logging.getLogger("accel.dataio")

# Batches that a dataset is watched for: whether fetching changes it.
_WATCHED = 3
_CALLS_INIT = "only processes call the loader's worker_init_fn"


class Measured:
    """Fetch under the tuner's settings.

    Args:
        engines: those that the tuner chooses among.

    Attributes:
        tuner: chooses the setting.
    """

    def __init__(self, engines: LoaderEngines) -> None:
        self._engines, self._left_at = engines, math.nan
        self.tuner = _tuner(engines)
        # On the first batches. Draws are seen by the engine: around a fetch the sampler draws too.
        watched = _undeclared(engines, fetch_of(engines.loader))
        self._watch = FetchWatch(watched, draws=False) if self.tuner.current == INLINE else None

    def begin(self) -> None:
        """Begin an epoch: the time before its first batch says nothing about the step."""
        self._left_at = math.nan

    def leave(self) -> None:
        """Record when the loop goes on with its step."""
        self._left_at = time.perf_counter()

    def fetch(self, core: LoaderCore, continuous: PrefetchAcrossEpochs) -> Any:
        """Return the next batch, by the engines of `core`."""
        tuner = self.tuner
        if tuner.current != core.setting:
            core.follow(tuner)
        began, busy = time.perf_counter(), tuner.busy()
        try:
            batch = continuous.fetch() if self._watch is None else self._watched(self._watch, continuous)
        except (StopIteration, FetchTimeout):
            raise
        except (ThreadsDraw, BatchHasGraph) as error:
            tuner.forbid_threads(str(error))
            return self.fetch(core, continuous)
        except ours() as error:
            return self._otherwise(core, continuous, error)
        if isinstance(continuous.engine, InlineEngine):
            self._engines.slowest_s = max(self._engines.slowest_s, time.perf_counter() - began)
            if continuous.engine.draws:
                tuner.forbid_threads("fetching a sample draws random numbers")
        ended, changes = time.perf_counter(), tuner.changes
        tuner.served(ended - began, began - self._left_at, tuner.busy().since(busy), continuous.engine.capacity)
        if tuner.changes != changes:
            core.follow(tuner)
            log.info("%s", tuner.explain())
        return batch

    def _otherwise(self, core: LoaderCore, continuous: PrefetchAcrossEpochs, error: Exception) -> Any:
        """Make the batch that a setting failed at in the loop's own thread, as a plain loader would.

        If that raises too, it is the dataset's own error and no fault of the setting.
        """
        tuner = self.tuner
        if core.setting == INLINE:
            raise error
        if isinstance(error, WorkerDied) or self._engines.calls_init:
            # What ended two workers could end the loop's own process; another setting may do.
            tuner.failed(error)
            if tuner.exhausted:
                raise error
            return self.fetch(core, continuous)
        failed = tuner.current
        core.go_inline("")
        batch = continuous.fetch()
        if tuner.current == failed:
            tuner.failed(error)
        return batch

    def _watched(self, watch: FetchWatch, continuous: PrefetchAcrossEpochs) -> Any:
        batch = watch.around(continuous.fetch)
        self._engines.moved_file = self._engines.moved_file or watch.moved_file
        if watch.finding:
            self._engines.changing = watch.finding
            self.tuner.forbid_threads(watch.finding)
        if watch.finding or watch.fetches >= _WATCHED:
            self._watch = None
        return batch


def _tuner(engines: LoaderEngines) -> Tuner:
    loader, options, init = engines.loader, engines.options, engines.calls_init
    safe = options.thread_safe
    reason = unsafe(loader.dataset) if safe is None else "" if safe else "as requested (thread_safe=False)"
    return Tuner(
        engines.start_method(asked=engines.asked),
        no_threads=reason,
        ahead=LookAhead(engines.prefetch, fixed=options.prefetch is not None),
        limit=options.workers or (loader.num_workers if init else 0) or None,
        processes_only=_CALLS_INIT if init else "",
        own=loader.num_workers,
    )


def _undeclared(engines: LoaderEngines, fetch: Fetch) -> Fetch | None:
    """Return what of a loader's fetching is to be watched.

    Who declares that threads may read a dataset together means what it changes, too; of the collate function that says
    nothing.
    """
    if not engines.declared_safe:
        return fetch
    of_dataset = getattr(fetch.collate, "__self__", None) is fetch.dataset
    return None if of_dataset else fetch.of(None)
