"""Measure the gradient noise scale of a running training loop, on a sample of its steps.

    replicas, accumulation          the parts are there already: what arrives at the parameters for each micro-batch, on
                                    each rank. Ranks exchange a sketch of their gradients and a few sums
    one replica, one batch a step   the model's call is recorded, and replayed on a part of the batch

Between measured steps there are no hooks, and nothing is kept. On a measured step gradients are seen as they arrive,
before `DistributedDataParallel`, a communication hook, or clipping has changed them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from accel.errors import InvalidArgument
from accel.goodput.gradient_scales import GradientScales
from accel.goodput.gradient_sketch import GradientSketch
from accel.goodput.gradient_tap import trained_parameters
from accel.goodput.noise_parts import Gather, exchange
from accel.goodput.noise_refusal import Unmeasurable, reason_of
from accel.goodput.noise_replay import Call, ReplayedParts
from accel.goodput.noise_scale import NoiseScale, NoiseSums
from accel.goodput.noise_schedule import OVERHEAD, NoiseSchedule
from accel.goodput.noise_step import MeasuredStep
from accel.profiler.interruptions import ours

_FRUITLESS = 3
"""Measured steps in a row that said nothing, after which no more are measured."""


class NoiseMeter:
    """Measure the noise scale of one model; the loop's events are passed to it.

    Per step, in this order: `begin_step`; `begin_batch` for each batch; `call` in place of the model's call where
    `wants_call`; `before_update` when an optimizer is about to step; `end_step`. All ranks must pass the same steps.

    Args:
        model: perhaps in DistributedDataParallel, perhaps decorated by `accel.amp`.
        optimizers: that update it. If all are of Adam's kind, the noise is measured in their coordinates.
        noise: takes the measurements in; default a new one.
        replicas: ranks that train copies of the model, each with batches of its own; default 1.
        group: their process group; default torch's.
        gather: exchanges tensors between the ranks in place of the group: gives each what all of them passed, by rank.
        scaler: the loop's GradScaler, if it has one.
        overhead: share of the run's time that the meter's own work may take; default 0.015, which leaves room for what
            it disturbs beside, such as caches.
        parts: one of so many parts of a batch is replayed, see `ReplayedParts`; default 4.
        keep_shapes: replay whole batches only, for a model that is compiled or captured.
        clock: returns seconds.

    Attributes:
        noise: the statistics.
        reason: why the last measured step said nothing; '' if it did.
        refusal: why nothing is measured any more; '' while it is.
        last_cost_s: what the last measurement took, s; the next one waits until it is paid for.

    Raises:
        InvalidArgument: if an argument is out of range.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.01)
        >>> meter = NoiseMeter(model, [optimizer])
        >>> for step in range(20):
        ...     _ = meter.begin_step()
        ...     meter.begin_batch(16)
        ...     x = torch.randn(16, 4)
        ...     y = meter.call(model, (x,), {}) if meter.wants_call else model(x)
        ...     optimizer.zero_grad()
        ...     (y - x.sum(1, keepdim=True)).square().mean().backward()
        ...     meter.before_update(optimizer)
        ...     optimizer.step()
        ...     meter.end_step()
        >>> meter.noise.measured > 0, meter.reason
        (True, '')
        >>> meter.close()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        noise: NoiseScale | None = None,
        replicas: int = 1,
        group: dist.ProcessGroup | None = None,
        gather: Gather | None = None,
        scaler: torch.amp.GradScaler | None = None,
        overhead: float = OVERHEAD,
        parts: int = 4,
        keep_shapes: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if replicas < 1:
            raise InvalidArgument(f"replicas must be at least 1. Found: {replicas}.")
        self.noise = NoiseScale() if noise is None else noise
        self.reason = self.refusal = ""
        self.last_cost_s = 0.0
        self._model, self._optimizers = model, optimizers
        self._replicas, self._group, self._clock = replicas, group, clock
        self._gather = gather
        self._scales = GradientScales(scaler)
        self._schedule = NoiseSchedule(overhead)
        self._replay = ReplayedParts(model, parts, keep_shapes=keep_shapes)
        self._sketch = GradientSketch() if replicas > 1 else None
        self._measured: MeasuredStep | None = None
        self._sums: NoiseSums | None = None
        self._parameters: list[Tensor] = []
        self._began_s = self._own_s = self._exchange_s = 0.0
        self._batches = 0
        self._accumulates = False
        """The last step had several batches."""
        self._is_timed = False
        """The present step's time counts among the usual ones."""
        self._samples_passed = 0.0
        self._fruitless = 0
        self._was_preconditioned: bool | None = None

    # -- the loop's events ---------------------------------------------------------------------------------------------

    def begin_step(self) -> bool:
        """Begin a step, at the boundary, before its first batch is requested; return whether it is measured.

        One that has begun without an end is left out: an epoch's last request begins a step that the next epoch's first
        one begins again.
        """
        if self._measured is not None:
            self._leave_out()
        self._batches = 0
        self._is_timed = self._schedule.wants_time
        if self._is_timed:
            self._began_s = self._clock()
            if self._schedule.is_due() and not self.refusal:
                self._begin_measuring()
        return self._measured is not None

    def begin_batch(self, samples: int, accumulated: int = 1) -> None:
        """A batch has been delivered to this rank.

        Args:
            samples: in it; 0 if their number is not known.
            accumulated: batches whose gradients, each that of its own mean loss, are divided by their number only once
                they have arrived. A loop that accumulates by itself divides its losses.
        """
        self._scales.accumulated = accumulated
        self._batches += 1
        self._samples_passed += samples
        if self._measured is not None and not self._measured.updated:
            began = self._clock()
            self._attempt(lambda step: step.begin_batch(samples))
            self._own_s += self._clock() - began

    @property
    def wants_step(self) -> bool:
        """False while a coming step need not be passed but by `skip_step`: no measurement is near."""
        return self._measured is not None or self._schedule.wants_time

    @property
    def is_measuring(self) -> bool:
        """True within a measured step: its time is not that of others."""
        return self._measured is not None

    @property
    def wants_call(self) -> bool:
        """True while the model's calls should go through `call`."""
        return (
            self._measured is not None
            and not self._measured.updated
            and self._replicas == 1
            and not self._accumulates
            and torch.is_grad_enabled()
        )

    def call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of the model, and record it if it is wanted.

        Args:
            call: makes the call, and will make it again on a part of the batch. Strategies that prepare for a shape
                (compilation, captured graphs) should not be in it, or pass `keep_shapes`.
            args: of the call.
            kwargs: of the call.
        """
        step = self._measured if self.wants_call else None
        if step is None:
            return call(*args, **kwargs)
        began = self._clock()
        step.prepare(call, args, kwargs)
        self._own_s += self._clock() - began
        outputs = call(*args, **kwargs)
        self._attempt(lambda step: step.listen(outputs))
        return outputs

    def before_update(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step; gradients may have been clipped, the weights are those of the step."""
        if self._measured is None or self._measured.updated:
            return
        began = self._clock()
        self._sums = self._measured.before_update(self._replay)
        self._own_s += self._clock() - began

    def end_step(self) -> None:
        """The step has ended."""
        self._accumulates = self._batches > 1
        if self._measured is not None:
            self._end_measuring(self._measured)
        elif not self._is_timed:
            self._schedule.skip_step()
        else:
            self._schedule.note_step(self._clock() - self._began_s)

    def skip_step(self, samples: int) -> None:
        """A step has ended that was not passed otherwise, of so many samples on this rank: it pays for measurements."""
        if self._measured is not None:
            self._leave_out()
        self._samples_passed += samples
        self._schedule.skip_step()

    def close(self) -> None:
        """Leave nothing behind, and measure no more; ranks must close between the same two steps."""
        self._leave_out()
        self.refusal = self.refusal or "the meter is closed"

    def _leave_out(self) -> None:
        """Take the hooks off if a measured step is under way, and forget it."""
        if self._measured is not None:
            self._measured.close()
        self._measured, self._sums = None, None

    # -- a measured step -----------------------------------------------------------------------------------------------

    def _begin_measuring(self) -> None:
        try:
            self._parameters = trained_parameters(self._model)
        except Unmeasurable as refusal:
            self.refusal = self.reason = str(refusal)
            return
        self._sums = None
        self._measured = MeasuredStep(self._model, self._parameters, self._optimizers, self._scales, self._sketch)
        self._own_s = self._clock() - self._began_s

    def _attempt(self, act: Callable[[MeasuredStep], None]) -> None:
        """Do a part of the measurement: what fails in it is none of the loop's errors."""
        assert self._measured is not None
        try:
            act(self._measured)
        except ours() as error:
            self._measured.reason = self._measured.reason or reason_of(error)

    def _end_measuring(self, step: MeasuredStep) -> None:
        began = self._clock()
        self._measured = None
        step.close()
        took = began - self._began_s - self._schedule.usual_s
        self._own_s += self._clock() - began
        # Hooks and gradients that are kept slow the loop itself down; a stall of the machine is not their doing.
        cost_s, usual_s = min(max(self._own_s, took), 2 * self._own_s), self._schedule.usual_s
        sums = None if step.reason else self._sums
        if self._replicas > 1:
            sums, cost_s, usual_s = self._exchanged(step, cost_s + self._exchange_s, usual_s)
        self._schedule.pay(cost_s, usual_s)
        self.last_cost_s = cost_s
        if sums is not None:
            self._take_in(sums, step.is_preconditioned)
        elif step.updated or self._replicas > 1:  # else a GradScaler has left the step out
            self._note_fruitless(step.reason)

    def _exchanged(self, step: MeasuredStep, cost_s: float, usual_s: float) -> tuple[NoiseSums | None, float, float]:
        assert self._sketch is not None
        began = self._clock()
        length = min(self._sketch.length, sum(p.numel() * (2 if p.is_complex() else 1) for p in self._parameters))
        parts = None if step.reason else step.parts
        exchanged = exchange(parts, length, self._parameters[0], cost_s, usual_s, self._group, self._gather)
        self._exchange_s = self._clock() - began
        return exchanged

    def _take_in(self, sums: NoiseSums, preconditioned: bool) -> None:
        if self._was_preconditioned not in (None, preconditioned):
            self.noise.reset()
        self._was_preconditioned = preconditioned
        self.noise.update(sums, self._samples_passed * self._replicas)
        self._samples_passed, self._fruitless, self.reason = 0.0, 0, ""

    def _note_fruitless(self, reason: str) -> None:
        self.reason = reason or ("another rank could not measure" if self._replicas > 1 else "one part is no parts")
        self._fruitless += 1
        if self._fruitless >= _FRUITLESS:
            self.refusal = self.reason
