"""The batch source of a continuous loader: which engine makes its batches, and where its loop stands."""

from __future__ import annotations

import itertools
import logging
import math
import time
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from accel.dataio.elastic_sampler import ElasticSampler
from accel.dataio.engine import transfer
from accel.dataio.engine.engine import (
    BatchHasGraph,
    FetchTimeout,
    InlineEngine,
    ThreadsDraw,
    WorkerDied,
)
from accel.dataio.passes import epochs, resume
from accel.dataio.passes.engines import LoaderEngines, Options, tuner_of, watch_of
from accel.dataio.passes.movable import not_movable, not_read_ahead
from accel.dataio.passes.passes import ActiveIterator, EpochIterator, InlineRest
from accel.dataio.passes.prefetch import PrefetchAcrossEpochs
from accel.dataio.passes.rounds import INLINE
from accel.profiler.interruptions import ours

if TYPE_CHECKING:
    from accel.dataio.passes.tuner import Tuner

log = logging.getLogger("accel.dataio")

# Batches that a dataset is watched for: whether fetching changes it.
_WATCHED = 3


class CoreIterator(EpochIterator):
    """A pass whose position is where the loop stands."""

    def __init__(self, core: LoaderCore) -> None:
        self._core = core
        super().__init__(None if core.device is None else transfer.AheadCopier(core.device))

    def _begin(self) -> None:
        self._core.begin(self)

    def _batch(self) -> Any:
        return self._core.fetch(self)

    def _rest_of(self, continuous: PrefetchAcrossEpochs) -> InlineRest:
        return InlineRest(continuous)

    def _stand_at(self, position: int) -> None:
        super()._stand_at(position)
        self._core.moved(self)

    def _end(self) -> None:
        self._core.ended(self)
        super()._end()


class LoaderPass(CoreIterator):
    """A pass over a continuous loader, as the profiler knows it: it marks this class, and asks for two attributes."""

    def __init__(self, core: LoaderCore, loader: Any) -> None:
        self._accel_loader = loader
        super().__init__(core)

    @property
    def _workers(self) -> list[Any]:
        return self._core.worker_processes()


class LoaderCore:
    """The engines of a loader, and the position of its loop."""

    def __init__(self, loader: DataLoader[Any], options: Options) -> None:
        self.loader, self.options = loader, options
        self.engines = LoaderEngines(loader, options)
        self.passed_through = not_movable(loader)
        self.device = None if options.device is None else torch.device(options.device)
        self.counts: bool | None = None
        self.reason, self.setting, self.tuner = "as requested", self.engines.requested, None
        self._measured: Measured | None = None
        if options.mode == "auto" and not self.passed_through:
            self.reason = "" if self.engines.asked else not_read_ahead(loader)
            if not self.reason:
                self._measured = Measured(self.engines)
                self.tuner = self._measured.tuner
                self.setting = self.tuner.current
        self._pins = False
        self.served, self.finished = 0, True
        self.loaded: Mapping[str, Any] | None = None
        self._continuous: PrefetchAcrossEpochs | None = None
        self._newest = ActiveIterator()
        self._begun: dict[str, Any] | None = None
        self._base_seed: int | None = None

    tuner: Tuner | None

    # -- engines -----------------------------------------------------------------------------------

    def follow(self, tuner: Tuner) -> None:
        """Switch to the tuner's setting from the next batch on; one whose engine can't start is not tried again."""
        assert self._continuous is not None
        while tuner.current != self.setting:
            try:
                engine = self.engines.get(tuner.current)
                engine.base_seed = self._continuous.epoch.lists.base_seed
                engine.start()
            except ours() as error:
                tuner.failed(error)
                if tuner.exhausted:
                    raise
                continue
            self._continuous.switch(engine)
            self.setting = tuner.current
        if self.setting.mode != "inline":
            self.engines.get(self.setting).capacity = self.setting.workers * tuner.ahead.batches
        if tuner.decided:
            self.engines.close(but=self.setting)

    def go_inline(self, reason: str) -> None:
        """Go on in the loop's own thread, with the very batch that was to come."""
        assert self._continuous is not None
        self._continuous.switch(self.engines.get())
        self.setting, self.reason = self.setting._replace(mode="inline", workers=1), reason

    def worker_processes(self) -> list[Any]:
        return self.engines.processes(self.setting)

    def close(self) -> None:
        self._newest.detach()
        if self._continuous is not None:
            self._continuous.drop()
            self._continuous = None
        self.engines.close()

    # -- passes ------------------------------------------------------------------------------------

    def begin(self, running: EpochIterator) -> None:
        """Begin a pass: with the batches prefetched for it, or by drawing the epoch now."""
        self._newest.begin(running)
        loaded = self.loaded
        if self.passed_through:  # the loader itself, from after the batches that a loaded state has counted
            batches, self.loaded = iter(self.loader), None
            self.finished, self.served = False, 0 if loaded is None else loaded["served"]
            running.position, running.rest = self.served, itertools.islice(batches, self.served, None)
            return
        if self._continuous is None:
            self._continuous = self._prefetching()
        running.continuous = self._continuous
        self._pins = self.loader.pin_memory and self.device is None and torch.cuda.is_available()
        if self._measured is not None:
            self._measured.begin()
        self.finished, self.served = False, 0
        if loaded is not None and loaded["begun"]["sampler_epoch"] == epochs.epoch_of(self.loader):
            self._begun, self.served = resume.begun_again(self.loader, loaded), loaded["served"]
            indices, self._base_seed = resume.draw_again(self.loader, self._begun, loaded)
            self._continuous.take(indices, base_seed=self._base_seed, first=self.served)
        else:
            self._begin_epoch(self._continuous)
        self.loaded = None
        if self.loader.num_workers > 0:
            self._continuous.prime()  # such a loader draws its first lists now, one without workers when it is asked
        running.position = self.served

    def _prefetching(self) -> PrefetchAcrossEpochs:
        engines = self.engines
        continuous = PrefetchAcrossEpochs(self.loader, engines.get(self.setting), strict=not engines.asked)
        starts_own = self.tuner is not None and self.loader.num_workers > 0 and not engines.calls_init
        if starts_own and (engine := engines.start_own()) is not None:
            continuous.copies.made(engine, early=True)
        return continuous

    def _begin_epoch(self, continuous: PrefetchAcrossEpochs) -> None:
        self._begun = resume.begun(self.loader)
        if continuous.resume():
            return
        continuous.drop()
        seeded = self._base_seed if epochs.persistent(self.loader) else None
        indices, self._base_seed = epochs.begin(self.loader, seeded=seeded)
        continuous.take(indices, base_seed=self._base_seed)

    def fetch(self, running: EpochIterator) -> Any:
        if running.continuous is None:
            batch = next(running.rest)
        elif self._measured is None:
            batch = self._as_requested(running.continuous)
        else:
            batch = self._measured.fetch(self, running.continuous)
        return transfer.pin(batch) if self._pins else batch

    def _as_requested(self, continuous: PrefetchAcrossEpochs) -> Any:
        try:
            return continuous.fetch()
        except (ThreadsDraw, BatchHasGraph) as error:
            advice = ". Use mode='processes' for such a dataset" if isinstance(error, ThreadsDraw) else ""
            mode = self.options.mode
            warnings.warn(f"{error}: mode={mode!r} goes on in the loop's own thread{advice}", stacklevel=5)
            self.go_inline(str(error))
            return continuous.fetch()

    def moved(self, running: EpochIterator) -> None:
        """Record the loop's position; a pass that goes on beside a newer one doesn't count."""
        if self._newest.is_(running):
            self.served, self.finished = running.position, False
            if self._measured is not None:
                self._measured.leave()

    def ended(self, running: EpochIterator) -> None:
        """Record that the loop stands between two epochs."""
        if self._newest.is_(running):
            self.finished = True

    # -- the loop's place --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the loop's place; see `accel.dataio.passes.resume`."""
        if self.loaded is not None:
            return dict(self.loaded)  # loaded and not begun: the loop stands where it stood
        # An elastic sampler knows its place itself, and begins its next pass there.
        finished = self.finished or isinstance(self.loader.batch_sampler, ElasticSampler)
        place = {"version": resume.VERSION, "served": 0 if finished else self.served, "finished": finished}
        if self.passed_through:
            return place
        return place | {
            "length": len(self.loader.dataset),  # type: ignore[arg-type]
            "begun": resume.begun(self.loader) if finished else self._begun,
            "base_seed": self._base_seed,
            "kept_seed": epochs.persistent(self.loader),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Record a state; the next pass goes on from it."""
        self._newest.forget()
        if self._continuous is not None:
            self._continuous.drop()
        self.loaded = None if state["finished"] else dict(state)
        self.finished = True  # if nothing was loaded: the loop stands between two epochs
        if not self.passed_through:
            resume.put_back(self.loader, state["begun"])
            self._base_seed = state["base_seed"]


class Measured:
    """Fetch each batch under the setting on trial, and report its time to the tuner."""

    def __init__(self, engines: LoaderEngines) -> None:
        self._engines, self._left_at = engines, math.nan
        self.tuner = tuner_of(engines)
        # On the first batches.
        self._watch = watch_of(engines) if self.tuner.current == INLINE else None

    def begin(self) -> None:
        """Begin an epoch: the time before its first batch says nothing about the step."""
        self._left_at = math.nan

    def leave(self) -> None:
        """Record when the loop goes on with its step."""
        self._left_at = time.perf_counter()

    def fetch(self, core: LoaderCore, continuous: PrefetchAcrossEpochs) -> Any:
        tuner = self.tuner
        if tuner.current != core.setting:
            core.follow(tuner)
        began, busy = time.perf_counter(), tuner.busy()
        try:
            batch = continuous.fetch() if self._watch is None else self._watched(continuous)
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

    def _watched(self, continuous: PrefetchAcrossEpochs) -> Any:
        watch = self._watch
        assert watch is not None
        batch = watch.around(continuous.fetch)
        self._engines.moved_file = self._engines.moved_file or watch.moved_file
        if watch.finding:
            self._engines.changing = watch.finding
            self.tuner.forbid_threads(watch.finding)
        if watch.finding or watch.fetches >= _WATCHED:
            self._watch = None
        return batch
