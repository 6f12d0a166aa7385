"""Mixed precision: float32 parameters, which optimizers update, and 16-bit copies of them that the model runs on."""

from __future__ import annotations

from accel.amp.decorate import decorate, master_params, undecorate
from accel.amp.loss_scale import DynamicLossScale

__all__ = [
    "DynamicLossScale",
    "decorate",
    "master_params",
    "undecorate",
]
