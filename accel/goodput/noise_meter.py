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
from torch import Tensor, nn
from torch.optim import Optimizer

from accel.device_memory import give_memory_back
from accel.errors import InvalidArgument
from accel.goodput import noise_gradients
from accel.goodput.noise_gradients import (
    Gather,
    GradientSketch,
    GradientTap,
    PartSums,
    Unmeasurable,
    exchange,
    reason_of,
)
from accel.goodput.noise_replay import Call, ReplayedParts
from accel.goodput.noise_scale import NoiseScale, NoiseSums
from accel.goodput.noise_schedule import OVERHEAD, NoiseSchedule
from accel.guard import guard
from accel.guard.guard import Recording
from accel.guard.snapshot import without_gradient
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
        gather: exchanges tensors between the ranks in place of torch's process group: gives each what all of them
            passed, by rank.
        scaler: the loop's GradScaler, if it has one.
        overhead: share of the run's time that the meter's own work may take; default 0.015, which leaves room for what
            it disturbs beside, such as caches.
        parts: one of so many parts of a batch is replayed, see `ReplayedParts`; default 4.
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
        gather: Gather | None = None,
        scaler: torch.amp.GradScaler | None = None,
        overhead: float = OVERHEAD,
        parts: int = 4,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if replicas < 1:
            raise InvalidArgument(f"replicas must be at least 1. Found: {replicas}.")
        self.noise = NoiseScale() if noise is None else noise
        self.reason = self.refusal = ""
        self.last_cost_s = 0.0
        self._model, self._optimizers = model, optimizers
        self._replicas, self._clock = replicas, clock
        self._gather = gather
        self._scaler, self._accumulated = scaler, 1
        self._schedule = NoiseSchedule(overhead)
        self._replay = ReplayedParts(model, parts)
        self._sketch = GradientSketch() if replicas > 1 else None
        self._measured: _MeasuredStep | None = None
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
        self._accumulated = accumulated
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
                (compilation, captured graphs) should not be in it.
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
            self._parameters = noise_gradients.trained_parameters(self._model)
        except Unmeasurable as refusal:
            self.refusal = self.reason = str(refusal)
            return
        self._sums = None
        self._measured = _MeasuredStep(self._model, self._parameters, self._optimizers, self._loss_scale, self._sketch)
        self._own_s = self._clock() - self._began_s

    def _loss_scale(self) -> float:
        """Return the factor on the gradients: averaged with those of other steps they must not have one."""
        scaled = self._scaler is not None and self._scaler.is_enabled()
        return (float(self._scaler.get_scale()) if scaled and self._scaler is not None else 1.0) * self._accumulated

    def _attempt(self, act: Callable[[_MeasuredStep], None]) -> None:
        """Do a part of the measurement: what fails in it is none of the loop's errors."""
        assert self._measured is not None
        try:
            act(self._measured)
        except ours() as error:
            self._measured.reason = self._measured.reason or reason_of(error)

    def _end_measuring(self, step: _MeasuredStep) -> None:
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

    def _exchanged(self, step: _MeasuredStep, cost_s: float, usual_s: float) -> tuple[NoiseSums | None, float, float]:
        assert self._sketch is not None
        began = self._clock()
        length = min(self._sketch.length, sum(p.numel() * (2 if p.is_complex() else 1) for p in self._parameters))
        parts = None if step.reason else step.parts
        exchanged = exchange(parts, length, self._parameters[0], cost_s, usual_s, self._gather)
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


class _MeasuredStep:
    """One measured step: from the hooks on the parameters to its sums.

    Args:
        model: whose gradients are measured.
        parameters: that require gradients, in the order of `named_parameters`.
        optimizers: that update them.
        loss_scale: returns what the gradients are divided by.
        sketch: of the vectors that ranks exchange; None on one rank.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Tensor],
        optimizers: Sequence[Optimizer],
        loss_scale: Callable[[], float],
        sketch: GradientSketch | None,
    ) -> None:
        self._model, self._parameters, self._optimizers = model, parameters, optimizers
        self._loss_scale = loss_scale
        self._tap = GradientTap(parameters)
        self._tap.install()
        self.parts = PartSums(sketch)
        self._is_alone = sketch is None
        self._samples = 0.0
        self._calls = 0
        self._recording: Recording | None = None
        self._call: Call | None = None
        self._denominators: Tensor | None = None
        self._reads_optimizers = True
        self.updated = False
        """An optimizer has stepped, or is about to."""
        self.reason = ""
        """Why it says nothing; '' if nothing speaks against it."""

    @property
    def is_preconditioned(self) -> bool:
        """True if the noise is measured in Adam's coordinates."""
        return self._denominators is not None

    def begin_batch(self, samples: float) -> None:
        """End the batch before, if there is one."""
        if self._tap.holds:
            self._end_batch()
        self._samples = samples

    def prepare(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call that is about to be made."""
        self._calls += 1
        if self._calls > 1:
            self._recording = None
            self.reason = f"the model was called {self._calls} times in one step, so no call has the whole gradient"
            return
        try:
            self._recording = guard.record(self._model, self._parameters[0].device, args, kwargs)
        except ours() as error:  # inputs that can't be copied
            self.reason = f"the call can't be recorded: {type(error).__name__}: {error}"
        self._call = call

    def listen(self, outputs: Any) -> None:
        """Listen to the recorded call's outputs."""
        if self._recording is not None:
            self._recording.listen(outputs)

    def before_update(self, replay: ReplayedParts) -> NoiseSums | None:
        """End the last batch, and return the step's sums if this rank alone knows them."""
        self.updated = True
        if self._recording is not None and not self.parts.count:
            return self._attempt(lambda: self._replayed(replay))
        return self._attempt(self._last_batch_ended)

    def close(self) -> None:
        """Take the hooks off."""
        if self.updated and self._tap.holds:
            self.reason = self.reason or "gradients arrived after an optimizer had stepped"
        self._tap.remove()
        if self._recording is not None:
            self._recording.forget()
        self._recording = self._call = None

    def _attempt(self, measure: Callable[[], NoiseSums | None]) -> NoiseSums | None:
        if self.reason:
            return None
        try:
            return measure()
        except ours() as error:  # out of memory in a replay, say: the loop goes on, and says nothing of it
            self.reason = reason_of(error)
        give_memory_back()
        return None

    def _replayed(self, replay: ReplayedParts) -> NoiseSums:
        assert self._recording is not None and self._call is not None
        recording, total = self._recording, self._vector(self._taken())
        given, written = (recording.args, recording.kwargs), without_gradient(self._model)
        untouched = guard.untouched(self._model, self._parameters[0].device, *given, written=written)
        with untouched:
            try:
                return replay.sums(recording, self._call, total, self._vector, self._coordinates, int(self._samples))
            finally:
                self._tap.take()  # a replay's gradients come by, too

    def _last_batch_ended(self) -> NoiseSums | None:
        self._end_batch()
        return self.parts.sums() if self._is_alone else None

    def _end_batch(self) -> None:
        if self._samples <= 0:
            raise Unmeasurable("the number of samples in a batch is not known")
        self.parts.add(self._coordinates(self._vector(self._taken())), self._samples)

    def _taken(self) -> list[Tensor | None]:
        if not self._tap.holds:
            raise Unmeasurable("no gradient has arrived at the parameters before the optimizer's step")
        return self._tap.take()

    @torch.no_grad()
    def _vector(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return gradients as one vector, without loss scales."""
        vector = noise_gradients.flattened(gradients, self._parameters)
        scale = self._loss_scale()
        return vector if scale == 1.0 else vector / scale

    def _coordinates(self, vector: Tensor) -> Tensor:
        """Return a vector in the optimizer's coordinates."""
        if self._reads_optimizers:
            self._reads_optimizers = False
            self._denominators = noise_gradients.denominators(self._parameters, self._optimizers)
        return vector if self._denominators is None else vector / self._denominators
