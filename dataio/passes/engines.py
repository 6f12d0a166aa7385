"""The engines by which a continuous loader's batches may be made: started as they are asked for, and kept."""

from __future__ import annotations

import logging
import multiprocessing
import sys
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch.utils.data import DataLoader

from accel.dataio.dataset.fetch_watch import FetchWatch
from accel.dataio.dataset.handles import HandleShared, check_fork, shared_handle
from accel.dataio.dataset.numbers import declared
from accel.dataio.dataset.thread_safety import unsafe
from accel.dataio.engine.engine import Engine, InlineEngine, ThreadEngine
from accel.dataio.engine.processes import STALL_S, ProcessEngine
from accel.dataio.fetching.fetch import fetch_of
from accel.dataio.passes.rounds import INLINE, Setting
from accel.dataio.passes.tuner import LookAhead, Tuner
from accel.profiler.errors import InvalidState
from accel.profiler.host import usable_cores
from accel.profiler.interruptions import ours

log = logging.getLogger("accel.dataio")

Mode = Literal["auto", "inline", "threads", "processes", "fork", "forkserver", "spawn"]
MODES = get_args(Mode)
_STALL_S = 3.0


class Options(NamedTuple):
    """The arguments of a `ContinuousLoader`."""

    mode: Mode
    num_workers: int | None
    prefetch_factor: int | None
    thread_safe: bool | None
    device: torch.device | str | None


class LoaderEngines:
    """Makes engines by their settings, where they may be had.

    Attributes:
        moved_file: one that was open before a fetch, and has been read from by it.
        changing: what fetching was seen to change.
        slowest_s: of the batches made in the loop's own thread.
    """

    def __init__(self, loader: DataLoader[Any], options: Options) -> None:
        self.loader, self.options = loader, options
        self.moved_file = self.changing = ""
        self.slowest_s = 0.0
        self._accepted = ""  # of `shared_handle`, when the user's own workers were started
        self._engines: dict[Setting, Engine] = {}

    @property
    def calls_init(self) -> bool:
        """Whether batches must come from workers, which call the worker_init_fn."""
        return self.loader.worker_init_fn is not None

    @property
    def asked(self) -> bool:
        """Whether the user asked for workers."""
        return self.options.mode != "auto" or self.loader.num_workers > 0 or self.calls_init

    @property
    def declared_safe(self) -> bool | None:
        """Whether threads may read the dataset at once, where an argument or the dataset declares it."""
        if self.options.thread_safe is not None:
            return self.options.thread_safe
        safe = declared(self.loader.dataset, "thread_safe")
        return safe if isinstance(safe, bool) else None

    @property
    def prefetch(self) -> int:
        """How many batches each worker is ahead at first."""
        return self.options.prefetch_factor or self.loader.prefetch_factor or 2

    @property
    def requested(self) -> Setting:
        """The setting that the mode names; "inline" for "auto"."""
        if self.options.mode in ("auto", "inline"):
            return INLINE
        count = self.options.num_workers or self.loader.num_workers or usable_cores()
        named = self.options.mode
        return Setting(self.start_method(asked=True) if named == "processes" else named, count)

    def start_method(self, *, asked: bool) -> str:
        """Return how processes are started; those that nobody asked for by fork: others import the user's script."""
        if not asked and sys.platform == "linux":
            return "fork"
        context = self.loader.multiprocessing_context or multiprocessing.get_context()
        return str(context.get_start_method())

    def get(self, setting: Setting = INLINE) -> Engine:
        """Return the engine of a setting; raises `HandleShared` where it may not be had."""
        if setting not in self._engines:
            self._engines[setting] = self._make(setting)
        engine = self._engines[setting]
        if isinstance(engine, ProcessEngine):
            engine.stall_s = self._stall_s
        return engine

    def _make(self, setting: Setting) -> Engine:
        loader = self.loader
        if setting.mode == "inline":
            return InlineEngine(loader)
        if not self.asked and self.moved_file:
            raise HandleShared(f"fetching reads from a file that was open before: {self.moved_file}")
        if setting.mode == "threads":
            # Who asked for worker processes did not ask for threads; and a dataset may have opened its file since.
            asked = self.options.mode == "threads" or self.declared_safe
            if not asked and (reason := shared_handle(loader) or unsafe(loader.dataset, loader.collate_fn)):
                raise HandleShared(reason)
            return ThreadEngine(loader, setting.workers, prefetch=self.prefetch)
        check, prefetch = self._check_fork if self._on_trial else None, self.prefetch
        return ProcessEngine(loader, setting.workers, start_method=setting.mode, prefetch=prefetch, check=check)

    @property
    def _on_trial(self) -> bool:
        """Whether processes are on trial, and the loop can make their batches itself."""
        return self.options.mode == "auto" and not self.calls_init

    @property
    def _stall_s(self) -> float:
        """How long a worker's first batch is waited for; on trial the loop must not stand still for long."""
        return max(_STALL_S, 10 * self.slowest_s) if self._on_trial else STALL_S

    def _check_fork(self, start_method: str) -> None:
        if not self.asked and self.changing:
            raise InvalidState(f"{self.changing}: each process would have a copy of its own")
        if not self.asked or start_method == "fork":
            check_fork(self.loader, start_method, accepted=self._accepted)

    def start_own(self) -> Engine | None:
        """Start the workers that the user asked for: the loop has opened nothing yet that fetching opens."""
        setting = Setting(self.start_method(asked=True), self.loader.num_workers)
        self._accepted = shared_handle(self.loader)
        try:
            engine = self.get(setting)
            engine.start()
        except ours() as error:
            log.info("%s can't be started: %s", setting, error)
            return None
        return engine

    def processes(self, setting: Setting) -> list[Any]:
        engine = self._engines.get(setting)
        return engine.processes if isinstance(engine, ProcessEngine) else []

    def close(self, but: Setting | None = None) -> None:
        for each in [each for each in self._engines if each != but]:
            self._engines.pop(each).close()


def tuner_of(engines: LoaderEngines) -> Tuner:
    """Return what chooses among the settings of a loader's engines."""
    loader, options, init = engines.loader, engines.options, engines.calls_init
    safe = options.thread_safe
    looked_at = unsafe(loader.dataset, loader.collate_fn) if safe is None else ""
    reason = "as requested (thread_safe=False)" if safe is False else looked_at
    return Tuner(
        engines.start_method(asked=engines.asked),
        no_threads=reason,
        ahead=LookAhead(engines.prefetch, fixed=options.prefetch_factor is not None),
        limit=options.num_workers or (loader.num_workers if init else 0) or None,
        processes_only="only processes call the loader's worker_init_fn" if init else "",
        own=loader.num_workers,
    )


def watch_of(engines: LoaderEngines) -> FetchWatch:
    """Return what sees whether fetching changes something.

    Who declares that threads may read a dataset together means what it changes, too; of the collate
    function that says nothing. Draws are seen by the engine: around a fetch the sampler draws too.
    """
    fetch = fetch_of(engines.loader)
    if not engines.declared_safe:
        return FetchWatch(fetch, draws=False)
    of_dataset = getattr(fetch.collate, "__self__", None) is fetch.dataset
    return FetchWatch(None if of_dataset else fetch.of(None), draws=False)
