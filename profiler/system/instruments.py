"""All that is read beside the recorder's clocks, in ordinary steps only, and the evidence that it makes together.

A thread samples the training thread's stack now and then, and whether that runs, waits or sleeps. The open phase is
read from the step clock, so that a phase's time can be divided by line. A sample costs handing the interpreter's lock
over and back, 0.1 ms; so nothing in it releases the lock a second time, as reading a file would.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

from accel.profiler.diagnose import step_times
from accel.profiler.evidence import Evidence, LineTime, ThreadShare
from accel.profiler.host import ThreadMeter, ThreadTime, usable_cores
from accel.profiler.loop import called_modules
from accel.profiler.loop.clock import StepClock, settled
from accel.profiler.loop.device import events_on
from accel.profiler.loop.recorder import Recorder
from accel.profiler.nvml import Nvml
from accel.profiler.phases import Measurement
from accel.profiler.system.loop_source import batch_lines, is_users, source, users_frames
from accel.profiler.system.meters import Crowd, DdpWait, Span, TorchSettings, Workers


class Instruments:
    """Everything that measures a loop besides its recorder.

    Args:
        recorder: of the loop.
        native: the system's id of the thread that trains.
        launched: other ranks train in step with this one.
    """

    def __init__(self, recorder: Recorder, native: int, *, launched: bool) -> None:
        self._recorder = recorder
        self.sampler = Sampler(recorder.clock, recorder.thread, native)
        self.sampler.pause(True)
        self.crowd = Crowd(launched=launched)
        self.workers, self.ddp_wait, self.collections = Workers(), DdpWait(), Span()
        self.settings, self.nvml = TorchSettings(), Nvml()
        self._is_on = False
        self._model_lines: set[tuple[str, int]] = set()
        self._updates: set[tuple[tuple[str, int], ...]] = set()
        """The user's frames in which the optimizers stepped, the innermost first."""

    def start(self) -> None:
        """Start; nothing counts yet."""
        self.sampler.start()

    def stop(self) -> None:
        """Stop for good; what was measured stays."""
        self._recorder.delivery.pauses.unwatch()
        self.sampler.stop()
        self.sampler.count(self._recorder.delivery.last_boundary)
        if self._is_on:
            self.crowd.end()
        self.ddp_wait.stop()
        self.workers.close()

    def watch(self, on: bool) -> None:
        """Count from here on, or no longer: only ordinary steps do."""
        recorder, self._is_on = self._recorder, on
        self.sampler.pause(not on)
        if on:
            self.crowd.begin()
            self._begin_workers()
            if recorder.loader_facts().workers:  # they sleep while the loop does something else
                recorder.delivery.pauses.watch(self._end_workers, self._begin_workers)
            self._begin_collections()
        else:
            recorder.delivery.pauses.unwatch()
            self._end_workers()
            self.crowd.end()

    def time_device(self, on: bool) -> None:
        """Time the steps from the next one on by a GPU too, if the model is on one; or no longer."""
        events, device = self._recorder.events, self._recorder.trained.device
        if events is None:
            return
        events.stop()
        if on and device.type == "cuda":  # an event would start CUDA in a script that trains on the CPU
            events.start(events_on(device))

    def _begin_workers(self) -> None:
        self.workers.begin(self._recorder.worker_pids())

    def _end_workers(self) -> None:
        self.workers.end(self._recorder.worker_pids())

    def _begin_collections(self) -> None:
        recorder = self._recorder
        self.collections.begin(recorder.delivery.steps, recorder.probes.collector.seconds, recorder.clock.now())

    def sample(self, *, workers: bool = True) -> None:
        """Take the readings between two ordinary steps."""
        if not self._is_on:
            return
        recorder, now = self._recorder, self._recorder.clock.now
        self.collections.end(recorder.delivery.steps, recorder.probes.collector.seconds, now())
        self.sampler.count(now())
        self.settings.sample()
        self.ddp_wait.sample(recorder.roots.modules, recorder.delivery.steps - 1)
        if workers:
            self.workers.sample(recorder.worker_pids())
        self._begin_collections()

    def learn_lines(self) -> None:
        """Find out, in the next call of the model and the next update, which lines of the script make batches."""

        def called() -> None:
            self._model_lines.update(users_frames(sys._getframe(1)))
            self.settings.look()

        def updated(optimizer: Any) -> None:
            self._recorder.on_update(None)
            self._recorder.calls.on_call = None
            self._updates.add(tuple(users_frames(sys._getframe(1))))
            step_lines = {line for frames in self._updates for line in frames}
            lines = (batch_lines(list(frames), self._model_lines) for frames in self._updates)
            self.sampler.batch_lines = set().union(*lines)
            self.sampler.call_lines = self._model_lines - step_lines

        self._recorder.on_update(updated)
        self._recorder.calls.on_call = called

    def evidence(self, kept: Sequence[Measurement]) -> Evidence:
        """Return what has been measured so far, beside these ordinary steps."""
        recorder, trained = self._recorder, self._recorder.trained
        taken = recorder.events.taken if recorder.events is not None else {}
        steps = step_times.by_device(kept, taken)
        is_timed = steps is not kept
        ordinary, slow_once = step_times.without_one_offs(steps)
        left_out = [measured.step for measured in slow_once]
        waited = self.ddp_wait.mean(without=left_out)
        step_s = sum(measured.seconds for measured in ordinary) / max(1, len(ordinary))
        unseen = [step_times.UNSEEN] if trained.device.type == "cuda" and not is_timed else []
        return Evidence(
            steps=ordinary,
            one_offs=slow_once,
            cores=usable_cores(),
            threads=self.settings.threads,
            device=trained.device.type,
            thread=self.sampler.thread(),
            data_thread=self.sampler.thread("data"),
            foreign_cores=self.crowd.cores(),
            throttled=self.crowd.throttled(),
            lines=self.sampler.lines(),
            model_called=bool(self._model_lines),
            loader=recorder.loader_facts(),
            workers=self.workers.shares(),
            collate_share=recorder.loaders.collating.share,
            gc_share=self.collections.share(without=left_out),
            optimizer=trained.optimizer,
            dtype=trained.dtype,
            anomaly_mode=self.settings.anomaly_mode,
            exchanges=self.ddp_wait.exchanges(),
            leaves_out_last=self.ddp_wait.leaves_out_last(),
            unused_search_share=self.ddp_wait.search(without=left_out) / step_s if step_s else 0.0,
            bucket_bytes=self.ddp_wait.bucket_bytes,
            ddp_wait_share=waited / step_s if waited is not None and step_s else None,
            host_ms={p: s * 1e3 for p, s in step_times.means(kept).items()} if is_timed else {},
            model_name=recorder.model_name or called_modules.name(recorder.roots.modules),
            unseen=[*unseen, *step_times.told_one_offs(ordinary, slow_once)],
        )


# -- sampled source lines ----------------------------------------------------------------------------------------------


# Part of a library's file name → what the user's line was doing.
_TAGS = (
    ("torch/serialization.py", "checkpoint"),
    ("torch/distributed/checkpoint", "checkpoint"),
    ("safetensors", "checkpoint"),
    ("_utils/collate.py", "collate"),
    ("_utils/fetch.py", "fetch"),
    ("logging/__init__.py", "logging"),
    ("tensorboard", "logging"),
    ("wandb", "logging"),
)
_MAX_DEPTH = 80
_SWITCH_S = 0.0001
_METER_EVERY = 16
"""Samples between two readings of the thread's waiting time, which release the interpreter's lock once more."""


@dataclass
class _LineSamples:
    seconds: float = 0.0
    blocked: float = 0.0
    tags: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Sample:
    """One look at the thread, for the time since the one before it."""

    at: float
    key: tuple[str, str, int]
    """Phase, file and line."""
    seconds: float
    ran: float
    tags: set[str]


class ThreadClocks(NamedTuple):
    """What the sampler reads of a thread: wall time, seconds it has computed, and how long it has waited for a core."""

    now: Callable[[], float]
    ran: Callable[[], float]
    meter: ThreadMeter

    @classmethod
    def of(cls, ident: int, native: int) -> ThreadClocks:
        """Return the system's clocks of a thread, by Python's and by the system's id."""
        cpu = time.pthread_getcpuclockid(ident)
        return cls(time.perf_counter, lambda: time.clock_gettime(cpu), ThreadMeter(tid=native))


class Sampler:
    """Samples a thread until stopped; a sample counts once the step that it was taken in has ended.

    Args:
        clock: a sample belongs to its open phase.
        ident: Python's thread id.
        native: the system's thread id.
        interval_s: time between samples.
        clocks: of the thread; the system's by default.
    """

    def __init__(
        self, clock: StepClock, ident: int, native: int, interval_s: float = 0.01, clocks: ThreadClocks | None = None
    ) -> None:
        self.batch_lines: set[tuple[str, int]] = set()
        """Lines that make or ask for the next batch."""
        self.call_lines: set[tuple[str, int]] = set()
        """Lines that call the model: before the call, they make its arguments."""
        self._clock = clock
        self._ident = ident
        self._clocks = clocks or ThreadClocks.of(ident, native)
        self.interval_s = interval_s
        self._samples: defaultdict[tuple[str, str, int], _LineSamples] = defaultdict(_LineSamples)
        self._waited = [0.0, 0.0]
        self._pending: list[_Sample] = []
        self._pending_waits: list[tuple[float, float, float]] = []
        """When it was read, the wall time until then, and how much of that the thread waited for a core."""
        self._stop = threading.Event()
        self._pause = False
        self._thread = threading.Thread(target=self._run, name="accel-sampler", daemon=True)
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start sampling."""
        # With Python's 5 ms, a sample that is due in Python code comes late, often only in the next operator.
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling; the samples stay."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)
            sys.setswitchinterval(self._switch_interval)
        self._clocks.meter.close()

    def pause(self, paused: bool) -> None:
        """Skip samples while `paused`."""
        self._pause = paused

    def _run(self) -> None:
        samples = self.samples()
        next(samples)
        while not self._stop.wait(self.interval_s):
            next(samples)

    def samples(self) -> Iterator[None]:
        """Take a sample at each turn but the first, which reads the clocks."""
        clocks = self._clocks
        at, ran = clocks.now(), clocks.ran()
        waited, count = clocks.meter.read(), 0
        while True:
            yield
            at_now, ran_now = clocks.now(), clocks.ran()
            if not self._pause:
                seconds = at_now - at
                self._record(at_now, seconds, min(seconds, ran_now - ran))
                count += 1
            at, ran = at_now, ran_now
            if count % _METER_EVERY == 0 or self._pause:
                waited = self._count_waiting(waited)

    def _count_waiting(self, before: ThreadTime | None) -> ThreadTime | None:
        """Add up, as the system reports it, how long the thread waited for a core."""
        now = self._clocks.meter.read()
        if before is not None and now is not None and not self._pause:
            with self._lock:
                self._pending_waits.append((now.at, now.at - before.at, now.wait - before.wait))
        return now

    def _record(self, at: float, seconds: float, ran: float) -> None:
        phase = settled(self._clock.code, within=False)
        frame = sys._current_frames().get(self._ident)
        batch_lines = self.batch_lines | self.call_lines if phase == "outside" else self.batch_lines
        location, tags = self._inspect(frame, batch_lines)
        del frame
        with self._lock:
            self._pending.append(_Sample(at, (phase, *location), seconds, ran, tags))

    def count(self, until: float) -> None:
        """Count the samples taken since the last call, up to when the last step ended; drop later ones."""
        with self._lock:
            for sample in self._pending:
                if sample.at <= until:
                    entry = self._samples[sample.key]
                    entry.seconds += sample.seconds
                    entry.blocked += sample.seconds - sample.ran
                    entry.tags |= sample.tags
            for at, seconds, waited in self._pending_waits:
                if at <= until:
                    self._waited[0] += seconds
                    self._waited[1] += waited
            self._pending, self._pending_waits = [], []

    def _inspect(self, frame: FrameType | None, batch_lines: set[tuple[str, int]]) -> tuple[tuple[str, int], set[str]]:
        """Return the user's innermost line, and tags for what the stack around it is doing."""
        location: tuple[str, int] | None = None
        tags: set[str] = set()
        depth = 0
        while frame is not None and depth < _MAX_DEPTH:
            file = frame.f_code.co_filename
            if is_users(file):
                line = (file, frame.f_lineno or 0)
                location = location or line
                if "collate" in frame.f_code.co_name:
                    tags.add("collate")
                if line in batch_lines:
                    tags.add("next batch")
            else:
                tags.update(tag for part, tag in _TAGS if part in file)
            frame = frame.f_back
            depth += 1
        return location or ("", 0), tags

    def thread(self, phase: str | None = None) -> ThreadShare | None:
        """Return how the thread spent its time, in one phase or in all; None if less than 50 ms were sampled."""
        with self._lock:
            rows = [row for (name, *_), row in self._samples.items() if phase in (None, name)]
            total, blocked = sum(row.seconds for row in rows), sum(row.blocked for row in rows)
            watched, waited = self._waited
        if total < 0.05:
            return None
        run = min(1.0, 1.0 - blocked / total)
        # How long it waited for a core is known for all phases together only.
        wait = min(1.0 - run, waited / watched if watched else 0.0)
        return ThreadShare(run=run, wait=wait, blocked=1.0 - run - wait)

    def lines(self) -> list[LineTime]:
        """Return where the time went, line by line, the most expensive first."""
        with self._lock:
            samples = {key: _LineSamples(p.seconds, p.blocked, set(p.tags)) for key, p in self._samples.items()}
        totals: defaultdict[str, float] = defaultdict(float)
        for (phase, _, _), line_samples in samples.items():
            totals[phase] += line_samples.seconds
        rows = [
            LineTime(
                phase=phase,
                file=file,
                line=line,
                source=source(file, line) if file else "",
                seconds=line_samples.seconds,
                share=line_samples.seconds / totals[phase],
                blocked=line_samples.blocked / line_samples.seconds,
                tags=sorted(line_samples.tags),
            )
            for (phase, file, line), line_samples in samples.items()
            if line_samples.seconds > 0
        ]
        return sorted(rows, key=lambda row: -row.seconds)
