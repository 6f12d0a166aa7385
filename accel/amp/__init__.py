"""Mixed precision: float32 parameters, which optimizers update, and 16-bit copies of them that the model runs on."""

from __future__ import annotations

from accel.amp.decorate import decorate, master_params, undecorate

__all__ = ["decorate", "master_params", "undecorate"]
