"""Fetch each batch under the setting on trial, and report its time to the tuner."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

from accel.dataio.dataset.fetch_watch import FetchWatch
from accel.dataio.engine.engine import BatchHasGraph, FetchTimeout, InlineEngine, ThreadsDraw, WorkerDied
from accel.dataio.passes.prefetch import PrefetchAcrossEpochs
from accel.dataio.passes.rounds import INLINE
from accel.dataio.passes.tuner import Tuner
from accel.profiler.interruptions import ours

if TYPE_CHECKING:
    from accel.dataio.passes.loader_core import LoaderCore

log = logging.getLogger("accel.dataio")

# Batches that a dataset is watched for: whether fetching changes it.
_WATCHED = 3


class Measured:
    """Fetch under the tuner's settings.

    Args:
        tuner: chooses the setting.
        watch: checks on the first batches whether threads may read this dataset.
    """

    def __init__(self, tuner: Tuner, watch: FetchWatch | None) -> None:
        self._tuner, self._watch = tuner, watch
        self._left_at = math.nan

    def begin(self) -> None:
        """Begin an epoch: the time before its first batch says nothing about the step."""
        self._left_at = math.nan

    def leave(self) -> None:
        """Record when the loop goes on with its step."""
        self._left_at = time.perf_counter()

    def fetch(self, core: LoaderCore, continuous: PrefetchAcrossEpochs) -> Any:
        """Return the next batch, by the engines of `core`."""
        tuner = self._tuner
        if tuner.current != core.setting:
            core.follow(tuner)
        began, busy = time.perf_counter(), tuner.busy()
        try:
            batch = continuous.fetch() if self._watch is None else self._watched(self._watch, core, continuous)
        except (StopIteration, FetchTimeout):
            raise
        except (ThreadsDraw, BatchHasGraph) as error:
            tuner.forbid_threads(str(error))
            return self.fetch(core, continuous)
        except ours() as error:
            return self._otherwise(core, continuous, error)
        if isinstance(continuous.engine, InlineEngine):
            core.slowest_s = max(core.slowest_s, time.perf_counter() - began)
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
        tuner = self._tuner
        if core.setting == INLINE:
            raise error
        if isinstance(error, WorkerDied) or core.calls_init:
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

    def _watched(self, watch: FetchWatch, core: LoaderCore, continuous: PrefetchAcrossEpochs) -> Any:
        batch = watch.around(continuous.fetch)
        core.moved_file = core.moved_file or watch.moved_file
        if watch.finding:
            core.changing = watch.finding
            self._tuner.forbid_threads(watch.finding)
        if watch.finding or watch.fetches >= _WATCHED:
            self._watch = None
        return batch
