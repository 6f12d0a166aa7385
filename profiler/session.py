"""The course of a profiled run: warm up, observe, trace two steps, try the suspects, and watch on to the end.

    warm-up 3 ──▶ observe ──▶ trace 2 ──▶ experiments ──▶ observe to the end
                  ≥ 50 steps, or 20 s     ≤ 3, each 36 to 108 steps

Everything happens between two steps of the script, on its own thread; only the sampler has a thread of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from accel.profiler import facts, naming, roofline, roots
from accel.profiler.evidence import Evidence, ThreadShare, TraceSummary, WorkerShare
from accel.profiler.gather import Exchange
from accel.profiler.host import CrowdMeter, ThreadMeter, ThreadTime, usable_cores
from accel.profiler.naming import Diagnosis
from accel.profiler.nvml import Nvml
from accel.profiler.phases import Measurement
from accel.profiler.recorder import Recorder, kept_steps
from accel.profiler.report import Experiment, Finding
from accel.profiler.sampler import Sampler
from accel.profiler.trace import Window, WindowTaken
from accel.profiler.whatif import (
    ALONE,
    TOGETHER,
    AllThreads,
    Counterfactual,
    FetchedAhead,
    NoAnomalyMode,
    NoCollector,
    NoExchange,
    OneUpdate,
    Snapshot,
    can_update_at_once,
    experiment,
)

WARM_UP = 3
OBSERVE_STEPS, OBSERVE_S, ENOUGH_S = 50, 0.6, 20.0
TRACED = 2
EXPERIMENTS = 3
PASSIVE_EVERY = 16
"""Steps from reading to reading of the tape, once nothing depends on the very step."""
_AHEAD = ("input.cpu", "input.storage", "input.workers", "input.worker_storage", "input.collate")

Course = Generator[None, Measurement, None]


class ProfileSession:
    """Profile the training loop that runs in this process.

    Args:
        confirm: try the suspects by experiment.
        trace_file: where the Chrome trace of the window goes; None writes none.
        exchange: the other ranks.
    """

    def __init__(self, *, confirm: bool, trace_file: Path | None, exchange: Exchange) -> None:
        self.recorder = Recorder()
        self.exchange = exchange
        self.experiments: dict[str, Experiment] = {}
        """By the cause they were made for."""
        self.untried: dict[str, str] = {}
        """Cause → why there was no experiment."""
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
        self._crowd = CrowdMeter(launched=exchange.launched)
        self._crowds: list[tuple[float, float]] = []
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self._nvml = Nvml([local] if exchange.launched else None)
        self._workers: dict[int, tuple[ThreadMeter, ThreadTime, ThreadTime]] = {}
        self._ddp_wait: list[float] = []
        self._gc = _Span()
        self._collate = _Span()
        self._watched_s = 0.0
        self._course = self._run()

    def start(self) -> None:
        """Begin; the loop may start now."""
        next(self._course)
        self.recorder.on_step = self._step
        self.recorder.start()
        self._sampler.start()
        if torch.cuda.is_available():
            self._nvml.start()

    def stop(self) -> None:
        """End, and leave torch and the script's objects as they were."""
        self._course.close()
        self.recorder.stop()
        self._sampler.stop()

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
        self.recorder.every = PASSIVE_EVERY
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
        if measured.step <= 8 or not self._sampler.batch_lines:
            self._learn_loop()
        if measured.step % PASSIVE_EVERY == 0:
            self._look_at_workers()
            self._look_at_ddp()

    def _watch(self, on: bool) -> None:
        """Switch what is only meant for ordinary steps."""
        self._sampler.pause(not on)
        recorder = self.recorder
        if on:
            self._gc.begin(recorder.gc_s)
            self._collate.begin(recorder.collate_s)
            self._crowd.cores()
            self._crowd_began = time.perf_counter()
            self._look_at_workers()
            return
        self._gc.end(recorder.gc_s)
        self._collate.end(recorder.collate_s)
        self._look_at_workers()
        others = self._crowd.cores()
        if others is not None:
            self._crowds.append((time.perf_counter() - self._crowd_began, others))
        for meter, _, _ in self._workers.values():
            meter.close()

    def _learn_loop(self) -> None:
        """See, in the next update, which lines of the script ask for batches."""

        def look(optimizer: Any) -> None:
            import sys

            from accel.profiler.loop_source import batch_lines, users_frames

            self.recorder.on_update = None
            self._sampler.batch_lines |= batch_lines(users_frames(sys._getframe(1)))

        self.recorder.on_update = look

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
            counterfactual = self._counterfactual(cause)
            if counterfactual is None:
                continue
            config = TOGETHER if self.exchange.launched else ALONE
            yield
            self.experiments[cause] = yield from experiment(counterfactual, config=config, snapshot=self._snapshot)

    def _suspects(self) -> list[str]:
        """Return the causes to try, the same on all ranks."""
        found = [finding.cause for finding in naming.diagnose(self.evidence()).findings]
        mine = [cause for cause in found if self._counterfactual(cause) is not None][:EXPERIMENTS]
        if not self.exchange.launched:
            return mine
        try:
            self.exchange.post("suspects", mine)
            everyone = self.exchange.collect("suspects") if self.exchange.rank == 0 else {}
            votes = Counter(cause for causes in everyone.values() for cause in causes)
            # Only what all ranks can switch at the same step; they must run the same number of steps.
            shared = [c for c, _ in votes.most_common(EXPERIMENTS)] if len(everyone) == self.exchange.size else []
            decided = self.exchange.decided("experiments", shared)
        except OSError as error:
            self.unseen.append(f"no experiments: {error}")
            return []
        return [str(cause) for cause in decided or []]

    def _counterfactual(self, cause: str) -> Counterfactual | None:
        """Return what to switch for a cause; None, with the reason kept, if there is nothing."""
        recorder = self.recorder
        if cause in _AHEAD and recorder.loader is not None:
            return FetchedAhead(recorder)
        if cause == "host.gc":
            return NoCollector()
        if cause == "compute.anomaly":
            return NoAnomalyMode()
        if cause == "compute.threads":
            return AllThreads(max(1, usable_cores() // self.exchange.local_size))
        if cause.startswith("optimizer.") and any(can_update_at_once(o) for o in recorder.optimizers):
            return OneUpdate(recorder.optimizers)
        ddp = [module for module in recorder.roots.modules if isinstance(module, DistributedDataParallel)]
        if cause == "communication.exposed" and ddp:
            return NoExchange(ddp)
        if cause.startswith("host."):
            return None
        self.untried[cause] = "no experiment removes it from a running script; the figure is from the clocks"
        return None

    def _snapshot(self) -> Snapshot:
        return Snapshot(self.recorder.roots.modules, self.recorder.optimizers)

    # -- looking around ------------------------------------------------------------------------------------------------

    def _device(self) -> torch.device:
        for optimizer in self.recorder.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    return torch.device(parameter.device)
        return torch.device("cpu")

    def _look_at_workers(self) -> None:
        for pid in self.recorder.worker_pids():
            if pid in self._workers:
                meter, first, last = self._workers[pid]
                self._workers[pid] = (meter, first, meter.read() or last)
                continue
            meter = ThreadMeter(pid)
            now = meter.read()
            if now is not None:
                self._workers[pid] = (meter, now, now)

    def _look_at_ddp(self) -> None:
        for module in self.recorder.roots.modules:
            if isinstance(module, DistributedDataParallel):
                module._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]
                told = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
                times = [told.get(f"backward_{part}", 0) for part in ("comm_time", "compute_comm_overlap_time")]
                if times[0]:
                    self._ddp_wait.append(max(0, times[0] - times[1]) * 1e-9)

    def evidence(self) -> Evidence:
        """Return what was seen so far."""
        recorder, exchange = self.recorder, self.exchange
        watched = self._watched_s or 1.0
        parameters = [p for o in recorder.optimizers for g in o.param_groups for p in g["params"]]
        fetching = sum(m.phases.get("data", 0.0) for m in self.steps)
        waited = sum(self._ddp_wait) / len(self._ddp_wait) if self._ddp_wait else None
        step_s = watched / max(1, len(self.steps))
        return Evidence(
            steps=list(self.steps),
            cores=usable_cores(),
            threads=torch.get_num_threads(),
            device=self._device().type,
            rank=exchange.rank,
            world_size=exchange.size,
            local_world_size=exchange.local_size,
            thread=self._sampler.thread(),
            data_thread=self._sampler.thread("data"),
            foreign_cores=self._foreign(),
            lines=self._sampler.lines(),
            loader=recorder.loader_facts(),
            workers=[WorkerShare(pid=pid, share=share) for pid, share in self._worker_shares().items()],
            collate_share=self._collate.total(recorder.collate_s) / fetching if fetching else 0.0,
            gc_share=self._gc.total(recorder.gc_s) / watched,
            optimizer=facts.of_optimizers(recorder.optimizers),
            dtype=facts.dtype(parameters),
            anomaly_mode=torch.is_anomaly_enabled(),
            ddp_wait_share=waited / step_s if waited is not None and step_s else None,
            trace=self._trace,
            model_name=roots.name(recorder.roots.modules),
            unseen=list(self.unseen),
        )

    def _foreign(self) -> float | None:
        total = sum(seconds for seconds, _ in self._crowds)
        return sum(seconds * cores for seconds, cores in self._crowds) / total if total else None

    def _worker_shares(self) -> dict[int, ThreadShare]:
        shares = {pid: first.share_until(last) for pid, (_, first, last) in self._workers.items()}
        return {pid: share for pid, share in shares.items() if share is not None}

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
        kept = []
        for finding in found.findings:
            told = self._with_experiment(finding)
            if told is not None:
                kept.append(told)
        found.findings = naming.ordered(kept)
        if not found.refused or found.refused.startswith("two causes"):
            found.refused = naming.too_close(found.findings)
        return found

    def _with_experiment(self, finding: Finding) -> Finding | None:
        """Add an experiment's result; None if it shows that nothing is won."""
        tried = self.experiments.get(finding.cause)
        if tried is None:
            late = "" if finding.bottleneck == "host" else "the run ended before it could be tried"
            reason = self.untried.get(finding.cause, late)
            return dataclasses.replace(finding, experiment=reason if self._confirm else "not tried: --no-confirm")
        if tried.verdict == "drop" and tried.saving.high < naming.WORTH:
            self.unseen.append(
                f"{finding.cause} looked like a cause ({finding.share:.0%} of the step); the experiment says removing "
                f"it gives {tried.saving.value:.1%}"
            )
            return None
        shown = tried.verdict == "keep" and tried.saving.low > 0
        return dataclasses.replace(finding, measured=tried.saving, confirmed=shown, experiment=tried.what)


class _Span:
    """A counter's growth while it was looked at."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._from: float | None = None

    def begin(self, value: float) -> None:
        self._from = value

    def end(self, value: float) -> None:
        if self._from is not None:
            self._sum += value - self._from
        self._from = None

    def total(self, value: float) -> float:
        """Return the growth so far."""
        return self._sum + (value - self._from if self._from is not None else 0.0)
