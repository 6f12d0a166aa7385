"""Timings of steps: when buckets were ready and averaged, and what was in them, as the hook sees it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from accel.comm.cost_model.choice import ObservedStep
from accel.comm.engine.gradient_engine import Averaged, GradientEngine
from accel.comm.layout import Layout

Work = tuple[float, float]


def work() -> Work:
    """Return the seconds of cores that this process has used, and those of the calling thread."""
    return time.process_time(), time.thread_time()


def unknown() -> Work:
    """Return 0 for both, where the work is not known."""
    return 0.0, 0.0


class _TimedStep(NamedTuple):
    began: float
    worked: Work
    bytes: list[int]
    ready: list[float]
    done: list[float]
    extra: list[float]


class Times:
    """Records of steps; a step lasts from its first bucket to the next step's.

    Args:
        clock: seconds, monotonic.
        work: seconds of cores that this process has used, and those of the calling thread; default `unknown`.
    """

    def __init__(self, clock: Callable[[], float], work: Callable[[], Work] = unknown) -> None:
        self._clock, self._work = clock, work
        self._now: _TimedStep | None = None
        self._steps: list[tuple[_TimedStep, float, Work]] = []

    def __len__(self) -> int:
        """Return the number of whole steps recorded."""
        return len(self._steps)

    def clear(self) -> None:
        """Forget all steps."""
        self._now, self._steps = None, []

    def open(self) -> None:
        """Begin a step: its first bucket is ready."""
        self._now = _TimedStep(self._clock(), self._work(), [], [], [], [])

    def close(self) -> None:
        """End the step that was begun, if there is one."""
        if self._now is not None:
            before, after = self._now.worked, self._work()
            self._steps.append((self._now, self._clock(), (after[0] - before[0], after[1] - before[1])))
            self._now = None

    def ready(self, nbytes: int) -> Callable[[], None] | None:
        """Note that a bucket is ready; return what notes that it is averaged, None while nothing is recorded."""
        if self._now is None:
            return None
        step, clock = self._now, self._clock
        step.bytes.append(nbytes)
        step.ready.append(clock() - step.began)
        return lambda: step.done.append(clock() - step.began)

    def extra(self, seconds: float) -> None:
        """Note time that the hook took for what DDP does in passing."""
        if self._now is not None:
            self._now.extra.append(seconds)

    def observed(self) -> ObservedStep:
        """Return the medians over the steps that had the buckets of the last one."""
        last = self._steps[-1][0]
        alike = [record for record in self._steps if record[0].bytes == last.bytes]
        ready = [statistics.median(times) for times in zip(*(step.ready for step, *_ in alike), strict=True)]
        return ObservedStep(
            tuple(last.bytes),
            tuple(seconds - ready[0] for seconds in ready),
            statistics.median(max(step.done) for step, *_ in alike) - ready[0],
            statistics.median(end - step.began for step, end, _ in alike),
            statistics.median(sum(step.extra) for step, *_ in alike),
            statistics.median(work for *_, (work, _) in alike),
            statistics.median(work for *_, (_, work) in alike),
        )


class StepRecorder:
    """Times and layouts of the steps of an engine, while it is on.

    Args:
        device: of the gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self.times = Times(time.perf_counter, work if device.type == "cpu" else unknown)
        self.on = False
        self._layouts: dict[int, Layout] = {}

    @property
    def layouts(self) -> list[Layout]:
        """Return those of the buckets of the last recorded step."""
        return [self._layouts[index] for index in sorted(self._layouts)]

    def end_step(self) -> None:
        """End the step that was begun, if there is one."""
        self.times.close()

    def begin_step(self) -> None:
        """Begin a step, if it is on: its first bucket is ready."""
        if self.on:
            self.times.open()

    def average(
        self,
        engine: GradientEngine,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        reduce: Callable[[Any], Averaged],
    ) -> Averaged:
        """Average a bucket by `reduce`, which is the engine's, and note it if it is on."""
        if not self.on:
            return reduce(bucket)
        self._note(engine.binding.layout(bucket))
        buffer, divided_s = bucket.buffer(), engine.divide_s
        done = self.times.ready(buffer.numel() * buffer.element_size())
        averaged = reduce(bucket)
        self.times.extra(engine.divide_s - divided_s)
        if done is None:
            return averaged

        def ended(averaged: Averaged) -> torch.Tensor:
            value = averaged.value()
            done()
            return value

        return averaged.then(ended)

    def _note(self, layout: Layout) -> None:
        self._layouts[layout.index] = layout
        if layout.is_last:
            self._layouts = {index: kept for index, kept in self._layouts.items() if index <= layout.index}
