"""The course of a profiled run: warm up, observe, trace two steps, test the suspects, and watch until the end.

    warm-up 3 ──▶ observe ──▶ trace 2 ──▶ experiments ──▶ observe to the end
                  ≥ 50 steps, or 20 s     ≤ 3, each 36 to 108 steps

Where other processes hold cores, all of that is done with as few threads as there are cores free (`ThreadLimit`).

Everything happens between two steps of the script, on its own thread; only the sampler has a thread of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path

import torch

from accel.profiler.conclusion import verdict
from accel.profiler.evidence import Evidence, TraceSummary
from accel.profiler.experiments import whatif
from accel.profiler.gather import Exchange
from accel.profiler.loop.recorder import Recorder
from accel.profiler.naming import MIN_STEPS, Diagnosis, diagnose
from accel.profiler.phases import Measurement
from accel.profiler.report import Experiment, Finding
from accel.profiler.system.instruments import Instruments
from accel.profiler.system.thread_limit import ThreadLimit
from accel.profiler.trace import roofline, window

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
        exchange: the other ranks. They train in step with this one, so all try the same at the same steps.
        loaders: loaders that iterate in their own way, each with the class of its iterators.
        thread: the one that trains, by Python's and by the system's id; default this one.
    """

    def __init__(
        self,
        *,
        confirm: bool,
        trace_file: Path | None,
        exchange: Exchange,
        loaders: Sequence[tuple[type, type]] = (),
        thread: tuple[int, int] | None = None,
    ) -> None:
        ident, native = thread or (threading.get_ident(), threading.get_native_id())
        self.recorder = Recorder(loaders=loaders, thread=ident)
        self.recorder.has_ranks = exchange.launched
        self.instruments = Instruments(self.recorder, native, launched=exchange.launched)
        self.exchange = exchange
        self.experiments: dict[str, Experiment] = {}
        """By the cause they tested."""
        self.steps: deque[Measurement] = deque(maxlen=self.recorder.delivery.keep_steps)
        self.unseen: list[str] = []
        self.stage = "warm-up"
        self._learns_until = 0
        """The step until which each update tells something about the loop's lines."""
        self._confirm = confirm
        self._trace_file = trace_file if exchange.rank == 0 else None
        self._trace: TraceSummary | None = None
        self._limit = ThreadLimit()
        self._suspected: list[Finding] = []
        self._course = self._run()

    def start(self) -> None:
        """Start profiling; the loop may start now."""
        next(self._course)
        self.recorder.delivery.on_step = self._course.send
        self.recorder.delivery.on_segment = self.instruments.sample
        self.recorder.start()
        self.instruments.start()

    def stop(self) -> None:
        """Stop profiling, and restore torch and the script's objects."""
        self._limit.restore()
        self.recorder.delivery.catch_up()
        self._course.close()
        self.instruments.time_device(False)
        self.recorder.stop()
        self.instruments.stop()

    def leave_alone(self) -> None:
        """Record no more: this is a forked child, whose training is not part of the report."""
        self._limit.restore()
        self.recorder.stop()

    # -- the course ----------------------------------------------------------------------------------------------------

    def _run(self) -> Course:
        for _ in range(WARM_UP):
            yield
        device = self.recorder.trained.device
        if device.type == "cuda":
            self.instruments.nvml.start(device)
        # Ranks have cores and threads of their own, and must go on at the same steps.
        if self._confirm and not self.exchange.launched and device.type == "cpu":
            yield from self._limit_threads()
        self.stage = "observing"
        self._learns_until = self.recorder.delivery.steps + _LEARNT_FROM
        self.instruments.watch(True)
        self.instruments.time_device(True)
        began = time.perf_counter()
        while True:
            self._keep((yield))
            if self._observed_enough(time.perf_counter() - began):
                break
        self.instruments.watch(False)
        self.instruments.time_device(False)
        self.stage = "tracing"
        yield  # the step between observing and tracing belongs to neither
        self._trace = yield from window.traced(
            self.recorder.trained.device,
            TRACED,
            self._trace_file,
            self.unseen,
            shared=self.instruments.crowd.are_shared(),
        )
        if self._confirm:
            self.stage = "trying"
            yield from self._try()
        self.stage = "watching"
        yield  # the first step after an experiment is not like the others
        self.instruments.watch(True)
        self.recorder.delivery.deferred = True
        self.instruments.sampler.interval_s = WATCH_S
        while True:
            self._keep((yield))

    def _limit_threads(self) -> Course:
        """Let no more threads compute than there are free cores; steps that have passed until then count without."""
        while not self._limit.begin():
            self.steps.append((yield))
        if self._limit.threads is not None:
            self.steps.clear()

    def _observed_enough(self, seconds: float) -> bool:
        steps = len(self.steps)
        if self.exchange.launched:  # ranks must proceed at the same step
            return steps >= OBSERVE_STEPS
        return (steps >= OBSERVE_STEPS and seconds >= OBSERVE_S) or (steps >= MIN_STEPS and seconds >= ENOUGH_S)

    def _keep(self, measured: Measurement) -> None:
        self.steps.append(measured)
        deferred = self.recorder.delivery.deferred
        if measured.step < self._learns_until or not (self.instruments.sampler.batch_lines or deferred):
            self.instruments.learn_lines()
        if not deferred:
            self.instruments.sample(workers=measured.step % _WORKERS_EVERY == 0)

    def _try(self) -> Course:
        # No experiment needs the roofline, and measuring it evicts the loop's data from the caches: it comes last.
        self._suspected = diagnose(self.evidence()).findings
        for cause in self._suspects():
            yield
            if not (self.exchange.launched or whatif.can_switch_off(cause, self.recorder)):
                continue
            passes = round(self.instruments.ddp_wait.exchanges())
            self.experiments[cause] = yield from whatif.try_without(
                cause, self.recorder, self.exchange.local_size, passes, together=self.exchange.launched
            )

    def _suspects(self) -> list[str]:
        """Return the causes to try, the same on all ranks."""
        causes = [finding.cause for finding in self._suspected]
        own = [cause for cause in causes if whatif.can_switch_off(cause, self.recorder)]
        if not self.exchange.launched:
            return own[: whatif.MOST]
        try:
            # A waiting rank suspects what the slow one can't see, so all votes count.
            return self.exchange.elect(own, whatif.MOST)
        except OSError as error:
            self.unseen.append(f"no experiments: {error}")
            return []

    # -- what was measured ---------------------------------------------------------------------------------------------

    def evidence(self) -> Evidence:
        """Return what has been measured so far."""
        evidence, exchange = self.instruments.evidence(self.steps), self.exchange
        evidence.threads, evidence.loop_threads = self._limit.threads or evidence.threads, self._limit.own
        evidence.rank, evidence.world_size = exchange.rank, exchange.size
        evidence.local_world_size = exchange.local_size
        evidence.trace = self._trace
        evidence.unseen = [*self.unseen, *evidence.unseen]
        return evidence

    def finish(self) -> Evidence:
        """Return everything that was measured."""
        evidence = self.evidence()
        if torch.cuda.is_available():
            nvml = self.instruments.nvml
            evidence.gpus = nvml.stop()
            evidence.unseen += [nvml.unseen] if nvml.unseen else []
        else:
            evidence.unseen.append("GPUs: torch sees none")
        evidence.unseen += [self.recorder.delivery.failed] if self.recorder.delivery.failed else []
        if evidence.thread is None:
            evidence.unseen.append("what the training thread did by line: the run was too short, or /proc is not there")
        if self._trace is None:
            evidence.unseen.append("operators: the run ended before the trace window")
        with contextlib.suppress(RuntimeError):  # out of memory: a report without a roofline is still one
            device = self.recorder.trained.device
            evidence.roofline = roofline.measure(device, roofline.dtypes_of(evidence), threads=self._limit.threads)
        return evidence

    def diagnose(self, evidence: Evidence) -> Diagnosis:
        """Name the causes, with the results of the experiments."""
        diagnosis = diagnose(evidence)
        self.unseen += verdict.judge(
            diagnosis, self.experiments, self._suspected, self._why_untried, {"host.gc": diagnosis.collected}
        )
        return diagnosis

    def _why_untried(self, finding: Finding) -> str:
        if not self._confirm:
            return "not tried: --no-confirm"
        is_gone = finding.cause.startswith("optimizer.") and not len(self.recorder.optimizers)
        if not is_gone and not whatif.can_switch_off(finding.cause, self.recorder):
            return "nothing switches it off in a running script; the figure is from the clocks"
        return "not tried: the run ended before, or it showed only later"
