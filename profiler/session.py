"""The course of a profiled run: warm up, observe, trace two steps, test the suspects, and watch until the end.

    warm-up 3 ──▶ observe ──▶ trace 2 ──▶ experiments ──▶ observe to the end
                  ≥ 50 steps, or 20 s     ≤ 3, each 36 to 108 steps

Where other processes hold cores, all of that is done with as few threads as there are cores free (`ThreadLimit`).

Everything happens between two steps of the script, on its own thread; only the sampler has a thread of its own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from accel.profiler import naming
from accel.profiler.conclusion import judging
from accel.profiler.diagnose import device_time, one_offs
from accel.profiler.diagnose.causes import CROWDS
from accel.profiler.diagnose.findings import are_shared, collected
from accel.profiler.evidence import Evidence, TraceSummary
from accel.profiler.experiments import suspects
from accel.profiler.experiments.whatif import ALONE, TOGETHER, Counterfactual, Snapshot, Unchanged, experiment
from accel.profiler.gather import Exchange
from accel.profiler.host import usable_cores
from accel.profiler.interruptions import ours
from accel.profiler.loop import called_modules as roots
from accel.profiler.loop import facts
from accel.profiler.loop.delivery import KEPT_STEPS
from accel.profiler.loop.device import Backlog, events_on
from accel.profiler.loop.patches import Loaders, has_gpu
from accel.profiler.loop.recorder import Recorder
from accel.profiler.naming import Diagnosis
from accel.profiler.nvml import Nvml
from accel.profiler.phases import Measurement
from accel.profiler.report import Experiment, Finding
from accel.profiler.system.loop_source import batch_lines, users_frames
from accel.profiler.system.meters import Crowd, DdpWait, Span, TorchSettings, Workers
from accel.profiler.system.sampler import Sampler
from accel.profiler.system.thread_limit import ThreadLimit
from accel.profiler.trace import roofline
from accel.profiler.trace.digest import located
from accel.profiler.trace.window import Window, WindowTaken

WARM_UP = 3
OBSERVE_STEPS, OBSERVE_S, ENOUGH_S = 50, 0.6, 20.0
TRACED = 2
WATCH_S = 0.1
"""Interval of the stack samples after the experiments; 0.01 before."""
_LEARNT_FROM = 6
"""Observed steps whose updates tell which lines of the script make batches, at the least."""
_WORKERS_EVERY = 16
"""Steps between two readings of the workers' times."""

Course = Generator[None, Measurement, None]


class ProfileSession:
    """Profiles the training loop that runs in this process.

    Args:
        confirm: test the suspects by experiments, and compute with fewer threads where others hold cores.
        trace_file: where the Chrome trace of the window goes; None writes none.
        exchange: the other ranks.
        loaders: loaders that iterate in their own way, each with the class of its iterators; see `Recorder`.
        thread: the one that trains, by Python's and by the system's id; default this one.
    """

    def __init__(
        self,
        *,
        confirm: bool,
        trace_file: Path | None,
        exchange: Exchange,
        loaders: Loaders = (),
        thread: tuple[int, int] | None = None,
    ) -> None:
        ident, native = thread or (threading.get_ident(), threading.get_native_id())
        self.recorder = Recorder(loaders=loaders, thread=ident)
        self.recorder.has_ranks = exchange.launched
        self.recorder.drain = self._drain
        self.exchange = exchange
        self.experiments: dict[str, Experiment] = {}
        """By the cause they tested."""
        self.steps: deque[Measurement] = deque(maxlen=KEPT_STEPS)
        self._samples = self._counted = 0
        """Samples in the steps whose batches were counted, and these steps."""
        self.unseen: list[str] = []
        self.stage = "warm-up"
        self._learns_until = 0
        """The step until which each update tells something about the loop's lines."""
        self._ends_at: int | None = None
        """The step from which on none is kept, as the threads are others."""
        self._confirm = confirm
        self._trace_file = trace_file
        self._trace: TraceSummary | None = None
        self._sampler = Sampler(self.recorder.clock, ident, native)
        self._sampler.pause(True)
        self._crowd = Crowd(launched=exchange.launched)
        self._limit = ThreadLimit()
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self._nvml = Nvml([local] if exchange.launched else None)
        self._workers, self._ddp_wait, self._gc = Workers(), DdpWait(), Span()
        self._settings = TorchSettings()
        self._suspected: list[Finding] = []
        self._model_lines: set[tuple[str, int]] = set()
        self._updates: set[tuple[tuple[str, int], ...]] = set()
        """The user's frames in which the optimizers stepped, the innermost first."""
        self._course = self._run()

    def start(self) -> None:
        """Start profiling; the loop may start now."""
        next(self._course)
        self.recorder.on_step = self._step
        self.recorder.on_segment = self._sample
        self.recorder.start()
        self._settings.start()
        self._sampler.start()

    def stop(self) -> None:
        """Stop profiling, and restore torch and the script's objects."""
        self._limit.restore()
        self.recorder.catch_up()
        self._course.close()
        self.recorder.pauses.unwatch()
        self.recorder.stop()
        self._settings.stop()
        self._sampler.stop()
        self._mark_device(False)
        self._sampler.count(self.recorder.last_boundary)
        if self.stage in ("observing", "watching"):
            self._crowd.end()
        self._ddp_wait.stop()
        self._workers.close()

    def leave_alone(self) -> None:
        """Record no more: this is a forked child, whose training is not part of the report."""
        self._limit.restore()
        self.recorder.stop()

    def _step(self, measured: Measurement) -> None:
        try:
            self._course.send(measured)
        except ours() as error:  # an error of the profiler's own must not end the script
            self.recorder.on_step = lambda measured: None
            self._limit.restore()
            self.unseen.append(f"the profiler stopped at step {measured.step}: {type(error).__name__}: {error}")

    # -- the course ----------------------------------------------------------------------------------------------------

    def _run(self) -> Course:
        for _ in range(WARM_UP):
            yield
        if has_gpu():  # not asked before: by now the script has said which ones it sees
            self._nvml.start()
        # Ranks have cores and threads of their own, and must go on at the same steps.
        if self._confirm and not self.exchange.launched and self._device().type == "cpu":
            yield from self._limit_threads()
        self.stage = "observing"
        self._learns_until = self.recorder.steps + _LEARNT_FROM
        self._watch(True)
        began = time.perf_counter()
        while True:
            self._keep((yield))
            if self._observed_enough(time.perf_counter() - began):
                break
        self._watch(False)
        self.stage = "tracing"
        yield from self._traced()
        if self._confirm:
            self.stage = "trying"
            yield from self._try()
        self.stage = "watching"
        yield  # the first step after an experiment is not like the others
        self._watch(True)
        self.recorder.deferred = True
        self._sampler.interval_s = WATCH_S
        while True:
            measured = yield
            if self._ends_at is None or measured.step < self._ends_at:  # read from the tape, long after
                self._keep(measured)

    def _limit_threads(self) -> Course:
        """Let no more threads compute than there are free cores; steps that have passed until then count without."""
        while not self._limit.begin():
            self._count((yield))
        if self._limit.is_on:
            self.steps.clear()
            self._samples = self._counted = 0

    def _observed_enough(self, seconds: float) -> bool:
        steps = len(self.steps)
        if self.exchange.launched:  # ranks must proceed at the same step
            return steps >= OBSERVE_STEPS
        return (steps >= OBSERVE_STEPS and seconds >= OBSERVE_S) or (steps >= naming.MIN_STEPS and seconds >= ENOUGH_S)

    def _count(self, measured: Measurement) -> None:
        self.steps.append(measured)
        if measured.samples:  # 0 in deferred steps, whose batches are not counted
            self._samples += measured.samples
            self._counted += 1

    def _keep(self, measured: Measurement) -> None:
        self._count(measured)
        if measured.step < self._learns_until or not (self._sampler.batch_lines or self.recorder.deferred):
            self._learn_loop()
        if not self.recorder.deferred:
            self._sample(workers=measured.step % _WORKERS_EVERY == 0)

    def _sample(self, *, workers: bool = True) -> None:
        """Take the readings between two ordinary steps."""
        if self.stage == "watched":
            return
        now, recorder = self.recorder.clock.now, self.recorder
        self._gc.end(recorder.steps, recorder.probes.collector.seconds, now())
        self._sampler.count(now())
        self._settings.sample()
        self._ddp_wait.sample(recorder.roots.modules, recorder.steps - 1)
        if workers:
            self._workers.sample(recorder.worker_pids())
        self._gc.begin(recorder.steps, recorder.probes.collector.seconds, now())
        if self.stage == "watching" and self._limit.ends():
            self._ends_at = recorder.steps
            self._watch(False)
            self.stage = "watched"

    def _watch(self, on: bool) -> None:
        """Switch the measurements that are only meant for ordinary steps."""
        recorder = self.recorder
        self._sampler.pause(not on)
        self._mark_device(on and self.stage == "observing")
        if on:
            self._crowd.begin()
            self._workers.begin(recorder.worker_pids())
            if recorder.loader_facts().workers:
                recorder.pauses.watch(lambda between: self._workers.end(recorder.worker_pids()), self._back)
            self._gc.begin(recorder.steps, recorder.probes.collector.seconds, recorder.clock.now())
        else:
            recorder.pauses.unwatch()
            self._workers.end(recorder.worker_pids())
            self._crowd.end()

    def _back(self) -> None:
        """The loop goes on with its steps; its workers slept while it did something else."""
        self._workers.begin(self.recorder.worker_pids())

    def _mark_device(self, on: bool) -> None:
        events = self.recorder.events
        if events is None:
            return
        events.stop()
        # An event would start CUDA in a script that trains on the CPU.
        if on and (device := self._device()).type == "cuda":
            events.start(events_on(device))

    def _backlog(self) -> Backlog | None:
        device = self._device()
        if device.type != "cuda":
            return None
        return Backlog(self.recorder.clock.now, functools.partial(torch.cuda.synchronize, device), events_on(device))

    def _drain(self) -> float:
        """Wait until a GPU has done what was queued, and return the seconds until then; 0 without one."""
        device = self.recorder.trained.device
        if device.type != "cuda":
            return 0.0
        began = self.recorder.clock.now()
        with contextlib.suppress(RuntimeError):  # an error of the script's, which its next call raises
            torch.cuda.synchronize(device)
        return self.recorder.clock.now() - began

    def _learn_loop(self) -> None:
        """Find out, in the next call of the model and the next update, which lines of the script make batches."""

        def called() -> None:
            self._model_lines.update(users_frames(sys._getframe(1)))

        def updated(optimizer: Any) -> None:
            self.recorder.on_update = self.recorder.on_call = None
            self._updates.add(tuple(users_frames(sys._getframe(1))))
            step_lines = {line for frames in self._updates for line in frames}
            lines = (batch_lines(list(frames), self._model_lines) for frames in self._updates)
            self._sampler.batch_lines = set().union(*lines)
            self._sampler.call_lines = self._model_lines - step_lines

        self.recorder.on_update, self.recorder.on_call = updated, called

    def _traced(self) -> Course:
        """Trace two steps; on a GPU one more with Python's stacks, which lengthen the gaps between kernels."""
        yield  # the step between observing and tracing belongs to neither
        self._trace = yield from self._window(TRACED, self._trace_file if self.exchange.rank == 0 else None)
        if self._device().type == "cuda":
            lines = yield from self._window(1, None, stacks=True)
            if self._trace is not None and lines is not None:
                self._trace.syncs = located(self._trace.syncs, lines.syncs)

    def _window(
        self, steps: int, file: Path | None, *, stacks: bool = False
    ) -> Generator[None, Measurement, TraceSummary | None]:
        """Let so many steps pass, traced if that is possible: ranks take the same number of steps either way."""
        window, summary = Window(self._device(), stacks=stacks), None
        try:
            window.start()
        except WindowTaken as error:
            self.unseen.append(str(error))
            for _ in range(steps):
                yield
            return None
        try:
            for _ in range(steps):
                yield
        finally:  # also if the script ends within the window
            summary = self._closed(window, steps, file)
        return summary

    def _closed(self, window: Window, steps: int, file: Path | None) -> TraceSummary | None:
        try:
            summary = window.stop(steps, shared=are_shared(self._crowd.cores(), usable_cores()))
            if file is not None:
                window.export(file)
                summary.file = file.name
        except WindowTaken as error:  # the script has started a profiler of its own meanwhile
            self.unseen.append(str(error))
            return None
        except OSError as error:
            self.unseen.append(f"the trace could not be written: {error}")
        self.unseen += [window.unseen] if window.unseen else []
        return summary

    # -- experiments ---------------------------------------------------------------------------------------------------

    def _try(self) -> Course:
        # No experiment needs the roofline, and measuring it evicts the loop's data from the caches: it comes last.
        for cause in self._suspects():
            switch = self._counterfactual(cause) or Unchanged()
            config = TOGETHER if self.exchange.launched else ALONE
            yield
            self.recorder.on_call = self.recorder.pauses.called if switch.changes_learning else None
            self.experiments[cause] = yield from experiment(
                switch, config=config, snapshot=self._snapshot, pauses=self.recorder.pauses, backlog=self._backlog()
            )
            self.recorder.on_call = None

    def _suspects(self) -> list[str]:
        self._suspected = naming.diagnose(self.evidence()).findings
        causes = (finding.cause for finding in self._suspected)
        switchable = [cause for cause in causes if self._counterfactual(cause) is not None]
        try:
            return suspects.agreed(switchable, self.exchange)
        except OSError as error:
            self.unseen.append(f"no experiments: {error}")
            return []

    def _counterfactual(self, cause: str) -> Counterfactual | None:
        return suspects.counterfactual(cause, self.recorder, self.exchange.local_size)

    def _snapshot(self) -> Snapshot:
        return Snapshot(self.recorder.roots.modules, self.recorder.optimizers)

    # -- evidence ------------------------------------------------------------------------------------------------------

    def _device(self) -> torch.device:
        return self._trained().device

    def _trained(self) -> facts.Trained:
        return facts.of_training(self.recorder.optimizers, self.recorder.trained)

    def evidence(self) -> Evidence:
        """Return what has been measured so far."""
        recorder, exchange = self.recorder, self.exchange
        trained = self._trained()
        taken = recorder.events.taken if recorder.events is not None else {}
        steps = device_time.by_device(self.steps, taken)
        is_timed = steps is not self.steps
        ordinary, slow_once = one_offs.split(steps)
        left_out = [measured.step for measured in slow_once]
        waited = self._ddp_wait.mean(without=left_out)
        step_s = sum(measured.seconds for measured in ordinary) / max(1, len(ordinary))
        return Evidence(
            steps=ordinary,
            one_offs=slow_once,
            cores=usable_cores(),
            threads=self._limit.threads or self._settings.threads,
            loop_threads=self._limit.own,
            device=trained.device.type,
            rank=exchange.rank,
            world_size=exchange.size,
            local_world_size=exchange.local_size,
            thread=self._sampler.thread(),
            data_thread=self._sampler.thread("data"),
            foreign_cores=self._crowd.cores(),
            throttled=self._crowd.throttled(),
            lines=self._sampler.lines(),
            model_called=bool(self._model_lines),
            loader=recorder.loader_facts(),
            workers=self._workers.shares(),
            collate_share=recorder.collating.share,
            gc_share=self._gc.share(without=left_out),
            optimizer=trained.optimizer,
            dtype=trained.dtype,
            anomaly_mode=self._settings.anomaly_mode,
            ddp_wait_share=waited / step_s if waited is not None and step_s else None,
            host_ms={p: s * 1e3 for p, s in device_time.means(self.steps).items()} if is_timed else {},
            trace=self._trace,
            model_name=roots.name(recorder.roots.modules),
            unseen=[
                *self.unseen,
                *([device_time.UNSEEN] if trained.device.type == "cuda" and not is_timed else []),
                *one_offs.told(ordinary, slow_once),
            ],
        )

    def finish(self) -> Evidence:
        """Return everything that was measured."""
        evidence = self.evidence()
        if torch.cuda.is_available():
            evidence.gpus = self._nvml.stop()
            evidence.unseen += [self._nvml.unseen] if self._nvml.unseen else []
        else:
            evidence.unseen.append("GPUs: torch sees none")
        evidence.unseen += [self.recorder.failed] if self.recorder.failed else []
        if evidence.thread is None:
            evidence.unseen.append("what the training thread did by line: the run was too short, or /proc is not there")
        if self._trace is None:
            evidence.unseen.append("operators: the run ended before the trace window")
        with contextlib.suppress(RuntimeError):  # out of memory: a report without a roofline is still one
            evidence.roofline = roofline.measure(self._device(), self._dtypes(evidence), threads=self._limit.threads)
        return evidence

    def _dtypes(self, evidence: Evidence) -> list[torch.dtype]:
        """Return those in which to measure products: on a GPU also the one in which most of the script's were."""
        names = ["float32", *(["float64"] if evidence.dtype == "float64" else [])]
        products = evidence.trace.dtypes if evidence.trace is not None and evidence.device == "cuda" else {}
        names += sorted(products, key=lambda name: products[name])[-1:]
        kinds = (getattr(torch, name, None) for name in dict.fromkeys(names))
        return [kind for kind in kinds if isinstance(kind, torch.dtype)]

    @property
    def samples_per_step(self) -> float | None:
        """Samples in a mean step; None if no batch has a length."""
        return self._samples / self._counted if self._counted else None

    def diagnose(self, evidence: Evidence) -> Diagnosis:
        """Name the causes, with the results of the experiments."""
        diagnosis = naming.diagnose(evidence)
        shares = {"host.gc": collected(evidence, diagnosis.anatomy)}
        self.unseen += judging.judge(diagnosis, self.experiments, self._suspected, self._why_untried, shares)
        return diagnosis

    def _why_untried(self, finding: Finding) -> str:
        if finding.cause in CROWDS:
            return ""
        if not self._confirm:
            return "not tried: --no-confirm"
        is_gone = finding.cause.startswith("optimizer.") and not len(self.recorder.optimizers)
        if not is_gone and self._counterfactual(finding.cause) is None:
            return "nothing switches it off in a running script; the figure is from the clocks"
        return "not tried: the run ended before, or it showed only later"
