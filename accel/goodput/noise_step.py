"""One measured step: from the hooks on the parameters to its sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel.device_memory import give_memory_back
from accel.goodput import gradient_vector
from accel.goodput.gradient_scales import GradientScales
from accel.goodput.gradient_sketch import GradientSketch
from accel.goodput.gradient_tap import GradientTap
from accel.goodput.noise_parts import PartSums
from accel.goodput.noise_refusal import Unmeasurable, reason_of
from accel.goodput.noise_replay import Call, ReplayedParts
from accel.goodput.noise_scale import NoiseSums
from accel.guard import guard
from accel.guard.guard import Recording
from accel.guard.written_parameters import without_gradient
from accel.profiler.interruptions import ours


class MeasuredStep:
    """Measure a step.

    Args:
        model: whose gradients are measured.
        parameters: that require gradients, in the order of `named_parameters`.
        optimizers: that update them.
        scales: what the gradients are divided by.
        sketch: of the vectors that ranks exchange; None on one rank.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Tensor],
        optimizers: Sequence[Optimizer],
        scales: GradientScales,
        sketch: GradientSketch | None,
    ) -> None:
        self._model, self._parameters, self._optimizers = model, parameters, optimizers
        self._scales = scales
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
        vector = gradient_vector.flattened(gradients, self._parameters)
        scale = self._scales.of_loss()
        return vector if scale == 1.0 else vector / scale

    def _coordinates(self, vector: Tensor) -> Tensor:
        """Return a vector in the optimizer's coordinates."""
        if self._reads_optimizers:
            self._reads_optimizers = False
            self._denominators = gradient_vector.denominators(self._parameters, self._optimizers)
        return vector if self._denominators is None else vector / self._denominators
