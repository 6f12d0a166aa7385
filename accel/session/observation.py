"""The profiler's evidence on steps that the controller wants diagnosed: the same as in `accel profile`.

Only while it is open: a wrapper around the backward pass, DDP's own timers, the training thread's CPU times from the
system, read when a batch is requested and delivered, and on a GPU an event at each mark and wrappers around copies to
it. Once it is closed, steps cost nothing more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from accel.profiler.evidence import Evidence, ThreadShare
from accel.profiler.host import ThreadMeter, ThreadTime
from accel.profiler.loop import backward, facts
from accel.profiler.loop.clock import StepClock
from accel.profiler.loop.device import DeviceSteps
from accel.profiler.phases import Measurement
from accel.profiler.system.meters import DdpWait
from accel.run.context import Run


class Observation:
    """Observe some steps.

    Args:
        clock: receives the times of the backward pass.
        number: tells the number of the step that ends.
        counts: returns whether the loop's own step is under way, and neither a rest nor a block that is not measured.
    """

    def __init__(
        self, clock: StepClock, run: Run, number: Callable[[], int], counts: Callable[[], bool] = lambda: True
    ) -> None:
        self._clock, self._run = clock, run
        self._counts, self._is_backward = counts, False
        self._ddp_wait = DdpWait()
        self._ddp_wait.sample([run.model])
        self._meter = ThreadMeter(tid=threading.get_native_id())
        self._began = self._meter.read()
        self._requested: ThreadTime | None = None
        self._waits: list[tuple[float, float, float]] = []
        self._device = DeviceSteps(clock, number, run.device, counts) if run.cuda else None
        backward.listen(self, first=True)
        if self._device is not None:
            self._device.install()
        clock.backward_is_seen = True

    def close(self) -> None:
        """Remove the wrapper and stop the timers."""
        self._ddp_wait.stop()
        if self._device is not None:
            self._device.remove()
        backward.forget(self)
        self._clock.backward_is_seen = False
        self._meter.close()

    def backward_begins(self, roots: list[Tensor]) -> None:
        """A backward pass of the loop begins."""
        self._is_backward = self._counts()
        if self._is_backward:
            self._clock.enter("backward")

    def backward_ended(self, roots: list[Tensor]) -> None:
        """It has ended."""
        if self._is_backward:
            self._clock.backwarded()

    def batch_requested(self) -> None:
        """The loop requests a batch."""
        self._ddp_wait.sample([self._run.model])
        self._requested = self._meter.read()

    def batch_delivered(self) -> None:
        """The batch is delivered."""
        now = self._meter.read()
        if self._requested is not None and now is not None:
            self._waits.append(
                (now.at - self._requested.at, now.run - self._requested.run, now.wait - self._requested.wait)
            )

    def evidence(self, steps: list[Measurement]) -> Evidence:
        """Return the evidence on these steps, which get a GPU's times; those of which it has none are left out."""
        if self._device is not None:
            self._device.apply(steps)
        run, now = self._run, self._meter.read()
        return Evidence(
            steps=steps,
            cores=run.cores,
            threads=torch.get_num_threads(),
            device=run.device.type,
            world_size=run.world_size,
            thread=self._began.share_until(now) if self._began is not None and now is not None else None,
            data_thread=self._waiting(),
            loader=facts.of_loader(run.loader),
            optimizer=facts.of_optimizers(run.optimizers),
            dtype=facts.dtype(run.model.parameters()),
            anomaly_mode=torch.is_anomaly_enabled(),
            ddp_wait_share=self._wait_share(steps),
            exchanges=self._ddp_wait.exchanges(),
        )

    def _wait_share(self, steps: list[Measurement]) -> float | None:
        """Return the share of the steps in which DDP waits for other ranks."""
        waited, seconds = self._ddp_wait.mean(), sum(step.seconds for step in steps)
        return None if waited is None or not seconds else waited * len(steps) / seconds

    def _waiting(self) -> ThreadShare | None:
        wall, ran, waited = (sum(part) for part in zip(*self._waits, strict=True)) if self._waits else (0.0, 0.0, 0.0)
        return ThreadTime(0.0, 0.0, 0.0).share_until(ThreadTime(wall, ran, waited))
