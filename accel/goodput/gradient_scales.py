"""The factors that the loop has put on a step's gradients.

A torch.amp.GradScaler multiplies the loss, and may change from step to step, so gradients are divided by its scale
before they are averaged with those of other steps. The loss scale of `accel.amp` never reaches them.
"""

from __future__ import annotations

import torch


class GradientScales:
    """Read the loss scale of a run.

    Args:
        scaler: of the loop, if it has one.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None = None) -> None:
        self._scaler = scaler
        self.accumulated = 1
        """Batches whose gradients are divided by their number only once they have arrived."""

    def of_loss(self) -> float:
        """Return the factor on the loss."""
        scaled = self._scaler is not None and self._scaler.is_enabled()
        return (float(self._scaler.get_scale()) if scaled and self._scaler is not None else 1.0) * self.accumulated
