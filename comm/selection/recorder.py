"""Timings of steps: when buckets were ready and averaged, and what was in them."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from accel.comm.engine.gradient_engine import Averaged, GradientEngine
from accel.comm.hooks import hook
from accel.comm.layout import Layout
from accel.comm.selection.timing import Times, unknown, work


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

    def average(self, engine: GradientEngine, bucket: dist.GradBucket) -> Averaged:  # type: ignore[name-defined]
        """Average a bucket as the engine does, and note it if it is on."""
        if not self.on:
            return hook(engine, bucket)
        self._note(engine.binding.layout(bucket))
        buffer, divided_s = bucket.buffer(), engine.divide_s
        done = self.times.ready(buffer.numel() * buffer.element_size())
        averaged = hook(engine, bucket)
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
