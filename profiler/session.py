"""The course of a profiled run: warm up, observe, trace two steps, try the suspects, and watch on to the end.

    warm-up 3 ──▶ observe ──▶ trace 2 ──▶ experiments ──▶ observe to the end
                  ≥ 50 steps, or 20 s     ≤ 3, each 36 to 108 steps

Everything happens between two steps of the script, on its own thread; only the sampler has a thread of its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from accel.profiler import naming
from accel.profiler.clocks import called_modules as roots
from accel.profiler.clocks import facts
from accel.profiler.clocks.probes import Loaders
from accel.profiler.clocks.recorder import Recorder, kept_steps
from accel.profiler.clocks.settings import TorchSettings
from accel.profiler.conclusion import judging
from accel.profiler.diagnose.causes import CROWDS
from accel.profiler.evidence import Evidence, TraceSummary
from accel.profiler.experiments import suspects
from accel.profiler.experiments.whatif import ALONE, TOGETHER, Counterfactual, Snapshot, Unchanged, experiment
from accel.profiler.gather import Exchange
from accel.profiler.host import usable_cores
from accel.profiler.naming import Diagnosis
from accel.profiler.nvml import Nvml
from accel.profiler.phases import Measurement
from accel.profiler.report import Experiment, Finding
from accel.profiler.system.loop_source import batch_lines, users_frames
from accel.profiler.system.meters import Crowd, Exposed, Span, Workers
from accel.profiler.system.sampler import Sampler
from accel.profiler.trace import roofline
from accel.profiler.trace.window import Window, WindowTaken

WARM_UP = 3
OBSERVE_STEPS, OBSERVE_S, ENOUGH_S = 50, 0.6, 20.0
TRACED = 2
WATCH_S = 0.1
"""From look to look at the stack after the experiments; 0.01 before."""
_LOOK_EVERY = 16
"""Steps from look to look at workers."""

Course = Generator[None, Measurement, None]


class ProfileSession:
    """Profile the training loop that runs in this process.

    Args:
        confirm: try the suspects by experiment.
        trace_file: where the Chrome trace of the window goes; None writes none.
        exchange: the other ranks.
        loaders: loaders that iterate in their own way, each with the class of its iterators; see `Recorder`.
    """

    def __init__(self, *, confirm: bool, trace_file: Path | None, exchange: Exchange, loaders: Loaders = ()) -> None:
        self.recorder = Recorder(loaders=loaders)
        self.exchange = exchange
        self.experiments: dict[str, Experiment] = {}
        """By the cause they were made for."""
        self.steps = kept_steps()
        self.samples = 0
        self.counted_s = 0.0
        self.unseen: list[str] = []
        self.stage = "warm-up"
        self.begun = time.perf_counter()
        self._confirm = confirm
        self._trace_file = trace_file
        self._trace: TraceSummary | None = None
        self._sampler = Sampler(self.recorder.clock, self.recorder.thread, threading.get_native_id())
        self._sampler.pause(True)
        self._crowd = Crowd(launched=exchange.launched)
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self._nvml = Nvml([local] if exchange.launched else None)
        self._workers, self._exposed, self._gc = Workers(), Exposed(), Span()
        self._settings = TorchSettings()
        self._suspected: list[Finding] = []
        self._model_lines: set[tuple[str, int]] = set()
        self._updates: set[tuple[tuple[str, int], ...]] = set()
        """Where the optimizers stepped: the user's frames, the innermost first."""
        self._watched_s = 0.0
        self._course = self._run()

    def start(self) -> None:
        """Begin; the loop may start now."""
        next(self._course)
        self.recorder.on_step = self._step
        self.recorder.on_look = self._look
        self.recorder.start()
        self._settings.start()
        self._sampler.start()
        if torch.cuda.is_available():
            self._nvml.start()

    def stop(self) -> None:
        """End, and leave torch and the script's objects as they were."""
        self.recorder.catch_up()
        self._course.close()
        self.recorder.stop()
        self._settings.stop()
        self._sampler.stop()
        self._exposed.stop()

    def _step(self, measured: Measurement) -> None:
        try:
            self._course.send(measured)
        except Exception as error:  # the profiler's own fault must not end the script
            self.recorder.on_step = lambda measured: None
            self.unseen.append(f"the profiler stopped at step {measured.step}: {type(error).__name__}: {error}")

    # -- the course ----------------------------------------------------------------------------------------------------

    def _run(self) -> Course:
        for _ in range(WARM_UP):
            yield
        self.stage = "observing"
        self._watch(True)
        began = time.perf_counter()
        while True:
            self._keep((yield))
            if self._seen_enough(time.perf_counter() - began):
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
        self.recorder.late = True
        self._sampler.interval_s = WATCH_S
        while True:
            self._keep((yield))

    def _seen_enough(self, seconds: float) -> bool:
        steps = len(self.steps)
        if self.exchange.launched:  # ranks must go on at the same step
            return steps >= OBSERVE_STEPS
        return (steps >= OBSERVE_STEPS and seconds >= OBSERVE_S) or (steps >= naming.MIN_STEPS and seconds >= ENOUGH_S)

    def _keep(self, measured: Measurement) -> None:
        self.steps.append(measured)
        if measured.samples:  # of steps that were looked at
            self.samples += measured.samples
            self.counted_s += measured.seconds
        self._watched_s += measured.seconds
        if not self.recorder.late and self.stage != "trying":  # an experiment sets what is looked at
            self._settings.look()
        if measured.step <= 8 or not (self._sampler.batch_lines or self.recorder.late):
            self._learn_loop()
        if not self.recorder.late:
            self._exposed.look(self.recorder.roots.modules)
            if measured.step % _LOOK_EVERY == 0:
                self._workers.look(self.recorder.worker_pids())

    def _look(self) -> None:
        self._settings.look()
        self._workers.look(self.recorder.worker_pids())
        self._exposed.look(self.recorder.roots.modules)

    def _watch(self, on: bool) -> None:
        """Switch what is only meant for ordinary steps."""
        self._sampler.pause(not on)
        self._workers.look(self.recorder.worker_pids())
        if on:
            self._gc.begin(self.recorder.probes.collector.seconds)
            self._mark_device(self.stage == "observing")
            self._crowd.begin()
        else:
            self._gc.end(self.recorder.probes.collector.seconds)
            self._mark_device(False)
            self._crowd.end()

    def _mark_device(self, on: bool) -> None:
        if self.recorder.events is not None:
            self.recorder.events.on = on

    def _learn_loop(self) -> None:
        """See, in the next call of the model and the next update, which lines of the script make batches."""

        def called() -> None:
            self._model_lines.update(users_frames(sys._getframe(1)))

        def look(optimizer: Any) -> None:
            self.recorder.on_update = self.recorder.on_call = None
            self._updates.add(tuple(users_frames(sys._getframe(1))))
            stepping = {place for frames in self._updates for place in frames}
            lines = (batch_lines(list(frames), self._model_lines) for frames in self._updates)
            self._sampler.batch_lines = set().union(*lines)
            self._sampler.call_lines = self._model_lines - stepping

        self.recorder.on_update, self.recorder.on_call = look, called

    def _traced(self) -> Course:
        """Trace two steps; on a GPU one more with Python's stacks, which would make gaps look longer than they are."""
        yield  # counted to neither
        self._trace = yield from self._window(TRACED, self._trace_file if self.exchange.rank == 0 else None)
        if self._device().type == "cuda":
            lines = yield from self._window(1, None, stacks=True)
            if self._trace is not None and lines is not None:
                self._trace.syncs = lines.syncs

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
        finally:  # also when the script ends within the window
            summary = self._closed(window, steps, file)
        return summary

    def _closed(self, window: Window, steps: int, file: Path | None) -> TraceSummary | None:
        try:
            summary = window.stop(steps)
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
        # The roofline is needed by no experiment, and it heats the caches: it is measured at the end.
        for cause in self._suspects():
            switch = self._counterfactual(cause) or Unchanged()
            config = TOGETHER if self.exchange.launched else ALONE
            yield
            self.experiments[cause] = yield from experiment(switch, config=config, snapshot=self._snapshot)

    def _suspects(self) -> list[str]:
        self._suspected = naming.diagnose(self.evidence()).findings
        found = [finding.cause for finding in self._suspected]
        try:
            return suspects.agreed([cause for cause in found if self._counterfactual(cause) is not None], self.exchange)
        except OSError as error:
            self.unseen.append(f"no experiments: {error}")
            return []

    def _counterfactual(self, cause: str) -> Counterfactual | None:
        return suspects.counterfactual(cause, self.recorder, self.exchange.local_size)

    def _snapshot(self) -> Snapshot:
        return Snapshot(self.recorder.roots.modules, self.recorder.optimizers)

    # -- looking around ------------------------------------------------------------------------------------------------

    def _device(self) -> torch.device:
        for optimizer in self.recorder.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    return torch.device(parameter.device)
        return torch.device("cpu")

    def evidence(self) -> Evidence:
        """Return what was seen so far."""
        recorder, exchange = self.recorder, self.exchange
        watched = self._watched_s or 1.0
        parameters = [p for o in recorder.optimizers for g in o.param_groups for p in g["params"]]
        waited = self._exposed.mean()
        step_s = watched / max(1, len(self.steps))
        return Evidence(
            steps=list(self.steps),
            cores=usable_cores(),
            threads=self._settings.threads,
            device=self._device().type,
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
            gc_share=self._gc.total(recorder.probes.collector.seconds) / watched,
            optimizer=facts.of_optimizers(recorder.optimizers),
            dtype=facts.dtype(parameters),
            anomaly_mode=self._settings.anomaly_mode,
            ddp_wait_share=waited / step_s if waited is not None and step_s else None,
            device_ms=recorder.events.ms() if recorder.events is not None else {},
            trace=self._trace,
            model_name=roots.name(recorder.roots.modules),
            unseen=list(self.unseen),
        )

    def finish(self) -> Evidence:
        """Take the last looks, and return what was seen in all."""
        if self.stage in ("observing", "watching"):
            self._watch(False)
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
            dtypes = [torch.float32, torch.float64] if evidence.dtype == "float64" else [torch.float32]
            evidence.roofline = roofline.measure(self._device(), dtypes)
        return evidence

    def judged(self, evidence: Evidence) -> Diagnosis:
        """Name the causes, with what the experiments found."""
        found = naming.diagnose(evidence)
        self.unseen += judging.judge(found, self.experiments, self._suspected, self._why_untried)
        return found

    def _why_untried(self, finding: Finding) -> str:
        if finding.cause in CROWDS:
            return ""
        if not self._confirm:
            return "not tried: --no-confirm"
        if self._counterfactual(finding.cause) is None:
            return "nothing switches it off in a running script; the figure is from the clocks"
        return "not tried: the run ended before, or it showed only later"
