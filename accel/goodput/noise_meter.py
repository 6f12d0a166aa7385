"""Measure the gradient noise scale of a running training loop, on a sample of its steps.

    replicas, accumulation          the parts are there already: what arrives at the parameters for each micro-batch, on
                                    each rank. Ranks exchange a sketch of their gradients and a few sums
    FSDP2                           the same, at the weights that it has gathered, of a sample of their coordinates
    one replica, one batch a step   the model's call is recorded, and replayed on a part of the batch

Between measured steps there are no hooks, and nothing is kept. On a measured step gradients are seen as they arrive,
before `DistributedDataParallel`, a communication hook, or clipping has changed them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
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
    ShardedSample,
    Unmeasurable,
    in_coordinates,
    step_sums,
)
from accel.goodput.noise_replay import Call, ReplayedParts
from accel.goodput.noise_scale import NoiseScale, NoiseSums
from accel.goodput.noise_schedule import NoiseSchedule
from accel.guard import guard
from accel.guard.alone import is_sharded
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
        model: perhaps in DistributedDataParallel or sharded by FSDP2, perhaps decorated by `accel.amp`.
        optimizers: that update it. If all are of Adam's kind, the noise is measured in their coordinates.
        noise: takes the measurements in; default a new one.
        replicas: ranks that train the model, whole or sharded, each with batches of its own; default 1.
        gather: gives each rank what all of them passed, by rank; needed where there are several.
        scaler: the loop's GradScaler, if it has one.

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
    ) -> None:
        if replicas < 1:
            raise InvalidArgument(f"replicas must be at least 1. Found: {replicas}.")
        if replicas > 1 and gather is None:
            raise InvalidArgument("gather must be given where there are several replicas")
        self.noise = NoiseScale() if noise is None else noise
        self.reason = self.refusal = ""
        self.last_cost_s = 0.0
        self._model, self._optimizers, self._scaler = model, optimizers, scaler
        self._replicas = replicas
        self.clock: Callable[[], float] = time.perf_counter
        self._gather = gather if replicas > 1 else None
        self._schedule = NoiseSchedule()
        self._replay = ReplayedParts(model)
        self._sketch = GradientSketch() if replicas > 1 else None
        self._measured: _MeasuredStep | None = None
        self._began_s = self._own_s = self._exchange_s = 0.0
        self._batches, self._accumulated = 0, 1
        self._accumulates = False
        """The last step had several batches."""
        self._is_timed = False
        """The present step's time counts among the usual ones."""
        self._samples_passed = 0.0
        self._fruitless = self._begun = 0
        self._was_preconditioned: bool | None = None

    # -- the loop's events ---------------------------------------------------------------------------------------------

    def begin_step(self) -> bool:
        """Begin a step, at the boundary, before its first batch is requested; return whether it is measured.

        One that has begun without an end is left out: an epoch's last request begins a step that the next epoch's first
        one begins again.
        """
        self._leave_out()
        self._batches = 0
        self._is_timed = self._schedule.wants_time
        if self._is_timed:
            self._began_s = self.clock()
            if self._schedule.is_due() and not self.refusal:
                self._begun += 1

                def scale() -> float:  # averaged with those of other steps, gradients must not have a factor
                    return _scale_of(self._scaler) * self._accumulated

                try:
                    sample = _sample_of(self._model, self._replicas, seed=self._begun)
                    self._measured = _MeasuredStep(self._model, self._optimizers, scale, self._sketch, sample)
                except ours() as error:  # also of what FSDP2 keeps, in another version of torch
                    self.refusal = self.reason = _why(error)
                self._own_s = self.clock() - self._began_s
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
            with self._working():
                self._measured.begin_batch(samples)

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
        with self._working():
            step.prepare(call, args, kwargs)
        outputs = call(*args, **kwargs)
        step.listen(outputs)
        return outputs

    def before_update(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step; gradients may have been clipped, the weights are those of the step."""
        if self._measured is not None and not self._measured.updated:
            with self._working():
                self._measured.before_update(self._replay)

    def end_step(self) -> None:
        """The step has ended."""
        self._accumulates = self._batches > 1
        if self._measured is not None:
            self._end_measuring()
        elif not self._is_timed:
            self._schedule.skip_step()
        else:
            self._schedule.note_step(self.clock() - self._began_s)

    def skip_step(self, samples: int) -> None:
        """A step has ended that was not passed otherwise, of so many samples on this rank: it pays for measurements."""
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
        self._measured = None

    # -- a measured step -----------------------------------------------------------------------------------------------

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Count the time of a block as the measurement's own."""
        began = self.clock()
        yield
        self._own_s += self.clock() - began

    def _end_measuring(self) -> None:
        """Take in what the measured step says, and wait for as many steps as pay for it."""
        step, began = self._measured, self.clock()
        assert step is not None
        with self._working():
            self._leave_out()
        usual_s = self._schedule.usual_s
        took = began - self._began_s - usual_s
        # Hooks and gradients that are kept slow the loop itself down; a stall of the machine is not their doing.
        cost_s = min(max(self._own_s, took), 2 * self._own_s)
        sums = None if step.reason else step.sums
        if self._gather is not None:
            began = self.clock()
            own = None if step.reason else step.parts.on_host()
            ranks, costs, usual = zip(*self._gather((own, cost_s + self._exchange_s, usual_s)), strict=True)
            sums = None if None in ranks else step_sums(in_coordinates(ranks))
            cost_s, usual_s = fmean(costs), fmean(usual)
            self._exchange_s = self.clock() - began
        self._schedule.pay(cost_s, usual_s)
        self.last_cost_s = cost_s
        if sums is not None:
            self._take_in(sums, step.is_preconditioned)
        elif step.updated or self._replicas > 1:  # else a GradScaler has left the step out
            self.reason = step.reason or (
                "another rank could not measure" if self._replicas > 1 else "one part is no parts"
            )
            self._fruitless += 1
            self.refusal = self.reason if self._fruitless >= _FRUITLESS else self.refusal

    def _take_in(self, sums: NoiseSums, preconditioned: bool) -> None:
        if self._was_preconditioned not in (None, preconditioned):
            self.noise.reset()
        self._was_preconditioned = preconditioned
        self.noise.update(sums, self._samples_passed * self._replicas)
        self._samples_passed, self._fruitless, self.reason = 0.0, 0, ""


def _scale_of(scaler: torch.amp.GradScaler | None) -> float:
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0


def _why(error: Exception) -> str:
    if isinstance(error, Unmeasurable):
        return str(error)
    return f"the measurement failed: {type(error).__name__}: {error}"


def _sample_of(model: nn.Module, replicas: int, seed: int) -> ShardedSample | None:
    """Return the coordinates of a sharded model that a step looks at, the same on all ranks; None of another model."""
    if not is_sharded(model):
        return None
    if replicas == 1:
        raise Unmeasurable("the parameters are sharded (DTensor), and there is one rank alone")
    return ShardedSample(model, seed)


class _MeasuredStep:
    """One measured step, from the hooks on the parameters to its sums; `reason` says why it has none.

    What fails in it is none of the loop's errors. `parts` are sums over this rank's micro-batches, `sums` what the step
    says if this rank alone knows it. `updated`: an optimizer has stepped, or is about to.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        loss_scale: Callable[[], float],
        sketch: GradientSketch | None,
        sample: ShardedSample | None,
    ) -> None:
        self.parts = PartSums()
        self.sums: NoiseSums | None = None
        self.updated = False
        self.reason = ""
        self._model, self._optimizers, self._loss_scale, self._sketch = model, optimizers, loss_scale, sketch
        self._sample = sample
        self._parameters = noise_gradients.trained_parameters(model) if sample is None else sample.places
        self._tap = GradientTap(self._parameters) if sample is None else sample.tap
        self._tap.install()
        self._samples = 0.0
        self._calls = 0
        self._recording: Recording | None = None
        self._call: Call | None = None
        self._denominators: Tensor | None = None
        self._reads_optimizers = True

    @property
    def is_preconditioned(self) -> bool:
        return self._denominators is not None or self.parts.moments is not None

    def begin_batch(self, samples: float) -> None:
        if self._tap.holds:
            self._attempt(self._end_batch)
        self._samples = samples

    def prepare(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls += 1
        self._call = call
        if self._calls > 1:
            self._recording = None
            self.reason = f"the model was called {self._calls} times in one step, so no call has the whole gradient"
            return

        def record() -> None:
            self._recording = guard.record(self._model, self._parameters[0].device, args, kwargs)

        self._attempt(record)

    def listen(self, outputs: Any) -> None:
        if (recording := self._recording) is not None:
            self._attempt(lambda: recording.listen(outputs))

    def before_update(self, replay: ReplayedParts) -> None:
        self.updated = True
        is_one = self._recording is not None and not self.parts.count
        self._attempt((lambda: self._replay(replay)) if is_one else self._end_last_batch)

    def close(self) -> None:
        if self.updated and self._tap.holds:
            self.reason = self.reason or "gradients arrived after an optimizer had stepped"
        self._tap.remove()
        if self._recording is not None:
            self._recording.forget()
        self._recording = self._call = None

    def _attempt(self, measure: Callable[[], None]) -> None:
        if self.reason:
            return
        try:
            measure()
        except ours() as error:  # out of memory in a replay, say
            self.reason = _why(error)
            give_memory_back()

    def _replay(self, replay: ReplayedParts) -> None:
        assert self._recording is not None and self._call is not None
        recording, total = self._recording, self._vector(self._taken())
        given, written = (recording.args, recording.kwargs), without_gradient(self._model)
        with guard.untouched(self._model, self._parameters[0].device, *given, written=written):
            try:
                count = int(self._samples)
                self.sums = replay.sums(recording, self._call, total, self._vector, self._coordinates, count)
            finally:
                self._tap.take()  # a replay's gradients come by, too

    def _end_last_batch(self) -> None:
        self._end_batch()
        if self._sample is not None:
            self.parts.moments = self._sample.moments(self._optimizers)
        self.sums = step_sums([self.parts]) if self._sketch is None else None

    def _end_batch(self) -> None:
        if self._samples <= 0:
            raise Unmeasurable("the number of samples in a batch is not known")
        vector = self._vector(self._taken())
        if self._sample is not None:
            return self.parts.add(vector, self._samples, is_sample=True)
        vector = self._coordinates(vector)
        self.parts.add(vector if self._sketch is None else self._sketch.of(vector), self._samples)

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
