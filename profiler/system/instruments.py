"""All that is read beside the recorder's clocks, in ordinary steps only, and the evidence that it makes together."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from accel.profiler.diagnose import step_times
from accel.profiler.evidence import Evidence
from accel.profiler.host import usable_cores
from accel.profiler.loop import called_modules
from accel.profiler.loop.device import events_on
from accel.profiler.loop.recorder import Recorder
from accel.profiler.nvml import Nvml
from accel.profiler.phases import Measurement
from accel.profiler.system.loop_source import batch_lines, users_frames
from accel.profiler.system.meters import Crowd, DdpWait, Span, TorchSettings, Workers
from accel.profiler.system.sampler import Sampler


class Instruments:
    """Everything that measures a loop besides its recorder.

    Args:
        recorder: of the loop.
        native: the system's id of the thread that trains.
        launched: other ranks train in step with this one.

    Attributes:
        sampler: which line the training thread is in.
        crowd: other processes on this run's cores.
        workers: the loader's processes.
        ddp_wait: DDP's wait for other ranks.
        collections: the garbage collector's time.
        settings: anomaly mode and the number of threads.
        nvml: the GPU's own figures.
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
