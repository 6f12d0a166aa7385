"""The maker of a continuous loader: its engines, and where its loop stands."""

from __future__ import annotations

import logging
import multiprocessing
import sys
import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import DataLoader

from accel.dataio.dataset.fetch_watch import FetchWatch
from accel.dataio.dataset.handles import HandleShared, check_fork, shared_handle
from accel.dataio.dataset.numbers import declared
from accel.dataio.dataset.thread_safety import unsafe
from accel.dataio.elastic_sampler import ElasticSampler
from accel.dataio.engine import transfer
from accel.dataio.engine.engine import BatchHasGraph, Engine, InlineEngine, ThreadEngine, ThreadsDraw, WorkersStuck
from accel.dataio.engine.processes import STALL_S, ProcessEngine
from accel.dataio.fetching.fetch import Fetch, fetch_of
from accel.dataio.passes import epochs, resume
from accel.dataio.passes.measured import Measured
from accel.dataio.passes.movable import not_movable, not_read_ahead
from accel.dataio.passes.passes import ActiveIterator, BatchSource, EpochIterator, InlineRest, Skipping
from accel.dataio.passes.prefetch import PrefetchAcrossEpochs
from accel.dataio.passes.rounds import INLINE, Setting
from accel.dataio.passes.tuner import LookAhead, Tuner
from accel.profiler.host import usable_cores
from accel.profiler.interruptions import ours

log = logging.getLogger("accel.dataio")

Mode = Literal["auto", "inline", "threads", "processes", "fork", "forkserver", "spawn"]
MODES = ("auto", "inline", "threads", "processes", "fork", "forkserver", "spawn")
_STALL_S = 3.0
_CALLS_INIT = "only processes call the loader's worker_init_fn"


class Options(NamedTuple):
    """The arguments of a `ContinuousLoader`."""

    mode: Mode
    workers: int | None
    prefetch: int | None
    thread_safe: bool | None
    device: torch.device | str | None


class CoreIterator(EpochIterator):
    """A pass whose position is where the loop stands."""

    def __init__(self, core: LoaderCore) -> None:
        self._core = core
        super().__init__(core, core.copier())

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


class LoaderCore(BatchSource):
    """The engines of a loader, and the position of its loop."""

    def __init__(self, loader: DataLoader[Any], options: Options) -> None:
        self.loader, self.options = loader, options
        self.passed_through = not_movable(loader)
        self.device = None if options.device is None else torch.device(options.device)
        self.counts: bool | None = None
        self.tuner: Tuner | None = None
        self.reason = "as requested"
        self.setting = self._first_setting()
        self._measured = self._measuring()
        self._pins = False
        self.served, self.finished = 0, True
        self.loaded: Mapping[str, Any] | None = None
        self.moved_file = ""  # by fetching, and open before
        self.changing = ""  # what fetching was seen to change
        self._accepted = ""  # of `shared_handle`, when the user's own workers were started
        self.slowest_s = 0.0  # batch made in the loop's own thread
        self._engines: dict[Setting, Engine] = {}
        self._continuous: PrefetchAcrossEpochs | None = None
        self._newest = ActiveIterator()
        self._begun: dict[str, Any] | None = None
        self._base_seed: int | None = None

    @property
    def calls_init(self) -> bool:
        """Whether batches must come from workers, which call the worker_init_fn."""
        return self.loader.worker_init_fn is not None

    @property
    def _asked(self) -> bool:
        """Whether the user asked for workers."""
        return self.options.mode != "auto" or self.loader.num_workers > 0 or self.calls_init

    @property
    def _declared_safe(self) -> bool | None:
        """Whether threads may read the dataset at once, where an argument or the dataset declares it."""
        if self.options.thread_safe is not None:
            return self.options.thread_safe
        safe = declared(self.loader.dataset, "thread_safe")
        return safe if isinstance(safe, bool) else None

    def _first_setting(self) -> Setting:
        mode, loader = self.options.mode, self.loader
        if mode == "auto" and not self.passed_through and not self._asked and (reason := not_read_ahead(loader)):
            self.reason = reason
            return INLINE
        if mode == "auto" and not self.passed_through:
            safe = self.options.thread_safe
            reason = unsafe(loader.dataset) if safe is None else "" if safe else "as requested (thread_safe=False)"
            ahead = LookAhead(self._prefetch, fixed=self.options.prefetch is not None)
            init, limit = self.calls_init, self.options.workers
            self.tuner = Tuner(
                _start_method(loader, self._asked),
                no_threads=reason,
                ahead=ahead,
                limit=limit or (loader.num_workers if init else 0) or None,
                processes_only=_CALLS_INIT if init else "",
                own=loader.num_workers,
            )
            return self.tuner.current
        if mode in ("auto", "inline"):
            return Setting("inline")
        count = self.options.workers or loader.num_workers or usable_cores()
        return Setting(_start_method(loader) if mode == "processes" else mode, count)

    def _measuring(self) -> Measured | None:
        if self.tuner is None:
            return None
        # Draws are seen by the engine: around a fetch the sampler draws too. Who declares that threads may read a
        # dataset together means what it changes, too; of the collate function that says nothing.
        watch = FetchWatch(self._undeclared(fetch_of(self.loader)), draws=False)
        return Measured(self.tuner, watch if self.setting == INLINE else None)

    def _undeclared(self, fetch: Fetch) -> Fetch | None:
        """Return what of a loader's fetching is to be watched."""
        if not self._declared_safe:
            return fetch
        of_dataset = getattr(fetch.collate, "__self__", None) is fetch.dataset
        return None if of_dataset else fetch.of(None)

    # -- engines -----------------------------------------------------------------------------------------------------

    def _engine(self, setting: Setting) -> Engine:
        if setting not in self._engines:
            self._engines[setting] = self._make(setting)
        return self._engines[setting]

    @property
    def _prefetch(self) -> int:
        return self.options.prefetch or self.loader.prefetch_factor or 2

    def _make(self, setting: Setting) -> Engine:
        prefetch = self._prefetch
        if setting.mode == "inline":
            return InlineEngine(self.loader)
        if not self._asked and self.moved_file:
            raise HandleShared(f"fetching reads from a file that was open before: {self.moved_file}")
        if setting.mode == "threads":
            # Who asked for worker processes did not ask for threads; and a dataset may have opened its file since.
            asked = self.options.mode == "threads" or self._declared_safe
            if not asked and (reason := shared_handle(self.loader) or unsafe(self.loader.dataset)):
                raise HandleShared(reason)
            return ThreadEngine(self.loader, setting.workers, prefetch=prefetch)
        return ProcessEngine(
            self.loader,
            setting.workers,
            start_method=setting.mode,
            prefetch=prefetch,
            stall_s=self._stall_s,
            check=self._check_fork if self._on_trial else None,
        )

    @property
    def _on_trial(self) -> bool:
        """Whether processes are on trial, and the loop can make their batches itself."""
        return self.tuner is not None and not self.calls_init

    @property
    def _stall_s(self) -> float:
        """How long a worker's first batch is waited for; on trial the loop must not stand still for long."""
        return max(_STALL_S, 10 * self.slowest_s) if self._on_trial else STALL_S

    def _check_fork(self, start_method: str) -> None:
        if not self._asked and self.changing:
            raise RuntimeError(f"{self.changing}: each process would have a copy of its own")
        if self._asked and start_method != "fork":
            return
        check_fork(self.loader, start_method, accepted=self._accepted)

    def _start_own(self, continuous: PrefetchAcrossEpochs) -> None:
        """Start the workers that the user asked for: the loop has opened nothing yet that fetching opens."""
        setting = Setting(_start_method(self.loader), self.loader.num_workers)
        self._accepted = shared_handle(self.loader)
        try:
            engine = self._engine(setting)
            engine.start()
            continuous.know(engine)
        except ours() as error:
            log.info("%s can't be started: %s", setting, error)

    def follow(self, tuner: Tuner) -> None:
        """Switch to the tuner's setting from the next batch on; one whose engine can't start is not tried again."""
        assert self._continuous is not None
        while tuner.current != self.setting:
            try:
                engine = self._engine(tuner.current)
                engine.base_seed = self._continuous.base_seed
                if isinstance(engine, ProcessEngine):
                    engine.stall_s = self._stall_s
                engine.start()
            except ours() as error:
                tuner.failed(error)
                if tuner.exhausted:
                    raise
                continue
            self._continuous.switch(engine)
            self.setting = tuner.current
        if self.setting.mode != "inline":
            self._engines[self.setting].capacity = self.setting.workers * tuner.ahead.batches
        if tuner.decided:
            for other in [each for each in self._engines if each != self.setting]:
                self._engines.pop(other).close()

    def go_inline(self, reason: str) -> None:
        """Go on in the loop's own thread, with the very batch that was to come."""
        assert self._continuous is not None
        self._continuous.switch(self._engine(INLINE))
        self.setting, self.reason = INLINE, reason

    def worker_processes(self) -> list[Any]:
        """Return the processes that make batches now."""
        engine = self._engines.get(self.setting)
        return engine.processes if isinstance(engine, ProcessEngine) else []

    def close(self) -> None:
        """End threads and processes."""
        self._newest.detach()
        if self._continuous is not None:
            self._continuous.drop()
            self._continuous = None
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    # -- passes --------------------------------------------------------------------------------------------------------

    def copier(self) -> transfer.AheadCopier | None:
        """Return what copies a pass's batches to the device; None if they stay where they are."""
        return None if self.device is None else transfer.AheadCopier(self.device)

    def begin(self, running: EpochIterator) -> None:
        """Begin a pass: with the batches prefetched for it, or by drawing the epoch now."""
        self._newest.begin(running)
        if self.passed_through:
            self._begin_plainly(running)
        else:
            continuous = self._prefetching()
            running.attach(continuous, InlineRest)
            self._begin_continuous(continuous)
            running.position = self.served

    def _begin_plainly(self, running: EpochIterator) -> None:
        """Iterate the loader itself, from after the batches that a loaded state has counted."""
        loaded, self.loaded = self.loaded, None
        batches = iter(self.loader)
        self.finished, self.served = False, 0 if loaded is None else loaded["served"]
        running.position, running.rest = self.served, Skipping(lambda: batches, self.served)

    def _prefetching(self) -> PrefetchAcrossEpochs:
        if self._continuous is None:
            self._continuous = PrefetchAcrossEpochs(self.loader, self._engine(self.setting), strict=not self._asked)
            if self.tuner is not None and self.loader.num_workers > 0 and not self.calls_init:
                self._start_own(self._continuous)
        return self._continuous

    def _begin_continuous(self, continuous: PrefetchAcrossEpochs) -> None:
        self._pins = self.loader.pin_memory and self.device is None and torch.cuda.is_available()
        if self._measured is not None:
            self._measured.begin()
        loaded = self.loaded
        self.finished, self.served = False, 0
        if loaded is not None and loaded["begun"]["sampler_epoch"] == epochs.epoch_of(self.loader):
            self._go_on(continuous, loaded)
        else:
            self._begin_epoch(continuous)
        self.loaded = None
        if self.loader.num_workers > 0:
            continuous.prime()  # a loader with workers draws its first lists now, one without when it is asked

    def fetch(self, running: EpochIterator) -> Any:
        """Return the next batch."""
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
        except (ThreadsDraw, BatchHasGraph, WorkersStuck) as error:
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

    def _go_on(self, continuous: PrefetchAcrossEpochs, loaded: Mapping[str, Any]) -> None:
        self._begun, self.served = resume.begun_again(self.loader, loaded), loaded["served"]
        indices, self._base_seed = resume.draw_again(self.loader, self._begun, loaded)
        continuous.take(indices, base_seed=self._base_seed, first=self.served)

    def _begin_epoch(self, continuous: PrefetchAcrossEpochs) -> None:
        self._begun = resume.begun(self.loader)
        if continuous.resume():
            return
        continuous.drop()  # before anything is drawn: it puts the generators back
        self._begun = resume.begun(self.loader)
        seeded = self._base_seed if epochs.persistent(self.loader) else None
        indices, self._base_seed = epochs.begin(self.loader, seeded=seeded)
        continuous.take(indices, base_seed=self._base_seed)

    # -- the loop's place --------------------------------------------------------------------------------------------

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


def _start_method(loader: DataLoader[Any], asked: bool = True) -> str:
    if not asked and sys.platform == "linux":
        return "fork"  # others import the user's script
    context = loader.multiprocessing_context or multiprocessing.get_context()
    return str(context.get_start_method())
