"""Timings of steps: when buckets were ready and averaged, and what was in them, as the hook sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from accel.comm.cost_model.choice import ObservedStep
from accel.comm.engine.gradient_engine import Averaged, GradientEngine
from accel.comm.layout import Layout

Work = tuple[float, float]


def used_cores() -> Work:
    """Return the seconds of cores that this process has used, and those of the calling thread."""
    return time.process_time(), time.thread_time()


class _TimedStep(NamedTuple):
    began: float
    worked: Work
    bytes: list[int]
    ready: list[float]
    done: list[float]
    extra: list[float]


class StepRecorder:
    """Times and layouts of the steps of an engine, while it is on; a step lasts from its first bucket to the next's.

    Args:
        device: of the gradients.
        clock: seconds, monotonic.
        work: seconds of cores that this process has used, and those of the calling thread; default: as far as they say
            something on this device.
    """

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
        work: Callable[[], Work] | None = None,
    ) -> None:
        self._clock, self._work = clock, work or (used_cores if device.type == "cpu" else lambda: (0.0, 0.0))
        self.on = False
        self._layouts: dict[int, Layout] = {}
        self.clear()

    def __len__(self) -> int:
        """Return the number of whole steps recorded."""
        return len(self._steps)

    def clear(self) -> None:
        """Forget the times of all steps."""
        self._now: _TimedStep | None = None
        self._steps: list[tuple[_TimedStep, float, Work]] = []

    @property
    def layouts(self) -> list[Layout]:
        """Return those of the buckets of the last recorded step."""
        return [self._layouts[index] for index in sorted(self._layouts)]

    def end_step(self) -> None:
        """End the step that was begun, if there is one."""
        if self._now is not None:
            before, after = self._now.worked, self._work()
            self._steps.append((self._now, self._clock(), (after[0] - before[0], after[1] - before[1])))
            self._now = None

    def begin_step(self) -> None:
        """Begin a step, if it is on: its first bucket is ready."""
        if self.on:
            self._now = _TimedStep(self._clock(), self._work(), [], [], [], [])

    def average(
        self,
        engine: GradientEngine,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        reduce: Callable[[Any], Averaged],
    ) -> Averaged:
        """Average a bucket by `reduce`, which is the engine's, and note it if it is on."""
        if not self.on:
            return reduce(bucket)
        layout, buffer, step, clock = engine.binding.layout(bucket), bucket.buffer(), self._now, self._clock
        self._layouts[layout.index] = layout
        if layout.is_last:
            self._layouts = {index: kept for index, kept in self._layouts.items() if index <= layout.index}
        if step is None:
            return reduce(bucket)
        step.bytes.append(buffer.numel() * buffer.element_size())
        step.ready.append(clock() - step.began)
        divided_s = engine.divide_s
        averaged = reduce(bucket)
        step.extra.append(engine.divide_s - divided_s)

        def ended(averaged: Averaged) -> torch.Tensor:
            value = averaged.value()
            step.done.append(clock() - step.began)
            return value

        return averaged.then(ended)

    def observed(self) -> ObservedStep:
        """Return the medians over the steps that had the buckets of the last one."""
        last = self._steps[-1][0]
        alike = [record for record in self._steps if record[0].bytes == last.bytes]
        ready = [median(times) for times in zip(*(step.ready for step, *_ in alike), strict=True)]
        return ObservedStep(
            tuple(last.bytes),
            tuple(seconds - ready[0] for seconds in ready),
            median(max(step.done) for step, *_ in alike) - ready[0],
            median(end - step.began for step, end, _ in alike),
            median(sum(step.extra) for step, *_ in alike),
            median(work for *_, (work, _) in alike),
            median(work for *_, (_, work) in alike),
        )
