"""The factors by which mixed precision has multiplied a step's gradients.

    of a torch.amp.GradScaler      multiplies the loss: what arrives at the model's outputs has it already
    of accel.amp (O2)              multiplies within the model's call: a replayed call multiplies by it again

Both may change from step to step, so gradients are divided by them before they are averaged with those of other steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from accel.amp.border import border_of
from accel.amp.loss_scale import DynamicLossScale


class GradientScales:
    """Read the loss scales of a run.

    Args:
        model: perhaps decorated by `accel.amp.decorate`, perhaps in DistributedDataParallel.
        scaler: of the loop, if it has one.
    """

    def __init__(self, model: nn.Module, scaler: torch.amp.GradScaler | None = None) -> None:
        self._model, self._scaler = model, scaler
        self.accumulated = 1
        """Batches whose gradients are divided by their number only once they have arrived."""

    def of_call(self) -> float:
        """Return the factor that a call of the model brings in now."""
        scale = self._in_model()
        return 1.0 if scale is None else float(scale.value)

    def of_loss(self) -> float:
        """Return the factor on the loss."""
        scaled = self._scaler is not None and self._scaler.is_enabled()
        return (float(self._scaler.get_scale()) if scaled and self._scaler is not None else 1.0) * self.accumulated

    @contextlib.contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Keep the model's loss scale from taking what passes through it for the loop's own backward pass."""
        scale = self._in_model()
        if scale is None:
            yield
            return
        forward, backward, came = list(scale.on_forward), list(scale.on_backward), scale.came_through
        held = list(scale.holds)
        scale.on_forward.clear()
        scale.on_backward.clear()
        scale.holds.append(lambda: True)  # nothing noted is taken into account meanwhile
        try:
            yield
        finally:
            scale.on_forward[:], scale.on_backward[:], scale.holds[:] = forward, backward, held
            scale.came_through = came

    def _in_model(self) -> DynamicLossScale | None:
        inner = getattr(self._model, "module", None)
        for model in (self._model, inner):
            border = border_of(model) if isinstance(model, nn.Module) else None
            if border is not None:
                return border.loss_scale
        return None
