"""Mixed precision by levels, O2 among them: 16-bit weights in the model, float32 master weights in the optimizer."""

from __future__ import annotations

from accel.amp.decorate import decorate
from accel.amp.functions import float_function, half_function, promote_function, register_function
from accel.amp.loss_scale import DynamicLossScale
from accel.amp.masters import master_params
from accel.amp.undecorate import undecorate

__all__ = [
    "DynamicLossScale",
    "decorate",
    "float_function",
    "half_function",
    "master_params",
    "promote_function",
    "register_function",
    "undecorate",
]
