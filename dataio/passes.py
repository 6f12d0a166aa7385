"""One pass over a continuous loader after the other: what makes the batches, where the loop stands, who iterates."""

from __future__ import annotations

import logging
import math
import multiprocessing
import sys
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import DataLoader

from accel.dataio import epochs, resume, transfer
from accel.dataio.choice import Choice
from accel.dataio.continuous import Continuous
from accel.dataio.dataset_epoch import said
from accel.dataio.elastic_sampler import ElasticSampler
from accel.dataio.engine import (
    Engine,
    FetchTimeout,
    InlineEngine,
    Job,
    ThreadEngine,
    ThreadsDraw,
    WorkerDied,
    WorkersStuck,
)
from accel.dataio.handles import HandleShared, check_fork, shared_handle
from accel.dataio.look_ahead import LookAhead
from accel.dataio.processes import ProcessEngine
from accel.dataio.rounds import Setting
from accel.dataio.thread_safety import unsafe
from accel.dataio.witness import Witness
from accel.profiler.host import usable_cores

log = logging.getLogger("accel.dataio")

Mode = Literal["auto", "inline", "threads", "processes", "fork", "forkserver", "spawn"]
MODES = ("auto", "inline", "threads", "processes", "fork", "forkserver", "spawn")
# Batches that a dataset is watched for: whether fetching changes it.
_WATCHED = 3
_STALL_S = 3.0
_INLINE = Setting("inline")
_CALLS_INIT = "only processes call the loader's worker_init_fn"


class Options(NamedTuple):
    """The arguments of a `ContinuousLoader`."""

    mode: Mode
    workers: int | None
    prefetch: int | None
    thread_safe: bool | None
    device: torch.device | str | None


def not_movable(loader: DataLoader[Any]) -> str:
    """Return '' if the loader's batches can be made elsewhere, else the reason why not."""
    if loader._dataset_kind != 0:
        return "its dataset is iterable: which items a worker reads is the dataset's own affair"
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"{type(loader).__name__} iterates in its own way"
    return ""


class Way:
    """How a loader's batches are made, and where its loop stands."""

    def __init__(self, loader: DataLoader[Any], options: Options) -> None:
        self.loader, self.options = loader, options
        self.passed_through = not_movable(loader)
        self.device = None if options.device is None else torch.device(options.device)
        self.counts: bool | None = None
        self.choice: Choice | None = None
        self.setting = self._first_setting()
        self.reason = "as told"
        # Draws are seen by the engine: around a fetch the sampler draws too. Whoever says that threads may read a
        # dataset together means what it changes, too.
        watch = options.mode == "auto" and self.setting.mode == "inline"
        self.witness = Witness(None if self._told else loader.dataset, draws=False) if watch else None
        self.served, self.finished = 0, True
        self.loaded: Mapping[str, Any] | None = None
        self.moved_file = ""  # by fetching, and open before
        self._accepted = ""  # of `shared_handle`, when the user's own workers were started
        self.slowest_s = 0.0  # batch made in the loop's own thread
        self._engines: dict[Setting, Engine] = {}
        self._continuous: Continuous | None = None
        self._running: weakref.ref[Pass] | None = None
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
    def _told(self) -> bool | None:
        """Whether threads may read the dataset at once, where somebody says so."""
        if self.options.thread_safe is not None:
            return self.options.thread_safe
        told = said(self.loader.dataset, "thread_safe")
        return told if isinstance(told, bool) else None

    def _first_setting(self) -> Setting:
        mode, loader = self.options.mode, self.loader
        if mode == "auto" and not self.passed_through:
            told = self.options.thread_safe
            reason = unsafe(loader.dataset) if told is None else "" if told else "as told (thread_safe=False)"
            ahead = LookAhead(self._prefetch, fixed=self.options.prefetch is not None)
            init, limit = self.calls_init, self.options.workers
            self.choice = Choice(
                _start_method(loader, self._asked),
                no_threads=reason,
                ahead=ahead,
                limit=limit or (loader.num_workers if init else 0) or None,
                processes_only=_CALLS_INIT if init else "",
                own=loader.num_workers,
            )
            return self.choice.current
        if mode in ("auto", "inline"):
            return Setting("inline")
        count = self.options.workers or loader.num_workers or usable_cores()
        return Setting(_start_method(loader) if mode == "processes" else mode, count)

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
            raise HandleShared(f"fetching reads on in a file that was open before: {self.moved_file}")
        if setting.mode == "threads":
            reason = "" if self._asked or self._told else shared_handle(self.loader)
            if reason:
                raise HandleShared(reason)
            return ThreadEngine(self.loader, setting.workers, prefetch=prefetch)
        # On trial the loop must not stand still for long: nobody asked for processes.
        stall_s = None if self.choice is None else max(_STALL_S, 10 * self.slowest_s)
        return ProcessEngine(
            self.loader,
            setting.workers,
            start_method=setting.mode,
            prefetch=prefetch,
            stall_s=stall_s,
            check=None if self.choice is None else self._check_fork,
        )

    def _check_fork(self, start_method: str) -> None:
        if self.calls_init or (self._asked and start_method != "fork"):
            return
        check_fork(self.loader, start_method, accepted=self._accepted)

    def _start_own(self, continuous: Continuous) -> None:
        """Start the workers that the user asked for: the loop has opened nothing yet that fetching opens."""
        setting = Setting(_start_method(self.loader), self.loader.num_workers)
        self._accepted = shared_handle(self.loader)
        try:
            engine = self._engine(setting)
            engine.start()
            continuous.know(engine)
        except Exception as error:
            log.info("%s can't be started: %s", setting, error)

    def follow(self, choice: Choice) -> None:
        """Make batches as `choice` wants from the next one on; a setting that can't be had is not tried again."""
        assert self._continuous is not None
        while choice.current != self.setting:
            try:
                engine = self._engine(choice.current)
                engine.base_seed = self._continuous.base_seed
                engine.start()
            except Exception as error:
                choice.failed(error)
                if choice.exhausted:
                    raise
                continue
            self._continuous.switch(engine)
            self.setting = choice.current
        if self.setting.mode != "inline":
            self._engines[self.setting].capacity = self.setting.workers * choice.ahead.batches
        if choice.decided:
            for other in [each for each in self._engines if each != self.setting]:
                self._engines.pop(other).close()

    def go_inline(self, reason: str) -> None:
        """Go on in the loop's own thread, with the very batch that was to come."""
        assert self._continuous is not None
        self._continuous.switch(self._engine(_INLINE))
        self.setting, self.reason = _INLINE, reason

    def worker_processes(self) -> list[Any]:
        """Return the processes that make batches now."""
        engine = self._engines.get(self.setting)
        return engine.processes if isinstance(engine, ProcessEngine) else []

    def close(self) -> None:
        """End threads and processes."""
        self._detach()
        if self._continuous is not None:
            self._continuous.drop()
            self._continuous = None
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def _detach(self) -> None:
        running = None if self._running is None else self._running()
        if running is not None:
            running.detach()

    # -- passes ------------------------------------------------------------------------------------------------------

    def begin(self, running: Pass) -> Continuous:
        """Begin a pass: go on with what was fetched ahead, or draw the epoch now."""
        self._detach()
        self._running = weakref.ref(running)
        if self._continuous is None:
            self._continuous = Continuous(self.loader, self._engine(self.setting), strict=not self._asked)
            if self.choice is not None and self.loader.num_workers > 0 and not self.calls_init:
                self._start_own(self._continuous)
        loaded = self.loaded
        self.finished, self.served = False, 0
        if loaded is not None and loaded["begun"]["sampler_epoch"] == epochs.epoch_of(self.loader):
            self._go_on(self._continuous, loaded)
        else:
            self._begin_epoch(self._continuous)
        self.loaded = None
        if self.loader.num_workers > 0:
            self._continuous.prime()  # a loader with workers draws its first lists now, one without when it is asked
        return self._continuous

    def _go_on(self, continuous: Continuous, loaded: Mapping[str, Any]) -> None:
        self._begun, self.served = resume.begun_again(self.loader, loaded), loaded["served"]
        indices, self._base_seed = resume.draw_again(self.loader, self._begun, loaded)
        continuous.take(indices, base_seed=self._base_seed, first=self.served)

    def _begin_epoch(self, continuous: Continuous) -> None:
        self._begun = resume.begun(self.loader)
        if continuous.resume():
            return
        continuous.drop()  # before anything is drawn: it puts the generators back
        self._begun = resume.begun(self.loader)
        indices, self._base_seed = epochs.begin(self.loader, seeded=self._base_seed if self._persistent else None)
        continuous.take(indices, base_seed=self._base_seed)

    @property
    def _persistent(self) -> bool:
        return self.loader.num_workers > 0 and self.loader.persistent_workers

    # -- the loop's place --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the loop's place; see `accel.dataio.resume`."""
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
            "kept_seed": self._persistent,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take note of a state; the next pass goes on from it."""
        self._detach()
        if self._continuous is not None:
            self._continuous.drop()
        self.loaded = None if state["finished"] else dict(state)
        self.finished = True  # if nothing was loaded: the loop stands between two epochs
        if not self.passed_through:
            resume.put_back(self.loader, state["begun"])
            self._base_seed = state["base_seed"]


class _Handing(ABC):
    """An iterator that hands batches over: copied to the device one ahead, counted."""

    def __init__(self, way: Way) -> None:
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

    def __init__(self, way: Way, loader: Any) -> None:
        super().__init__(way)
        self._accel_loader = loader  # the profiler asks for it, as it does for `_workers`
        self._continuous: Continuous | None = way.begin(self)
        self._rest: Iterator[Any] = iter(())
        self._left_at = math.nan
        self._pins = way.loader.pin_memory and way.device is None and torch.cuda.is_available()

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
            self._rest = _Rest(InlineEngine(self._way.loader), self._continuous.jobs_left())
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

    def _measured(self, choice: Choice) -> Any:
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

    def _otherwise(self, choice: Choice, error: Exception) -> Any:
        """Make the batch that a setting failed at in the loop's own thread, as a plain loader would.

        If that raises too, it is the dataset's own error and no fault of the setting.
        """
        continuous, way = self._continuous, self._way
        assert continuous is not None
        if way.setting == _INLINE:
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

    def _watched(self, witness: Witness, choice: Choice) -> Any:
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


class _Rest:
    """What is left of a pass, made in the loop's own thread."""

    def __init__(self, engine: InlineEngine, jobs: Iterator[Job]) -> None:
        self._engine, self._jobs = engine, jobs
        self._job: Job | None = None

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

    def __init__(self, way: Way) -> None:
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


def _start_method(loader: DataLoader[Any], asked: bool = True) -> str:
    if not asked and sys.platform == "linux":
        return "fork"  # others import the user's script
    context = loader.multiprocessing_context or multiprocessing.get_context()
    return str(context.get_start_method())
