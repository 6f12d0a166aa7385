"""Optimizers that update all parameters at once: SGD, Adam and AdamW as torch's, and LAMB and LARS."""

from __future__ import annotations

from accel.optim.adam import FusedAdam, FusedAdamW
from accel.optim.base import MultiTensorOptimizer
from accel.optim.lamb import FusedLAMB
from accel.optim.lars import FusedLARS
from accel.optim.sgd import FusedSGD

__all__ = ["FusedAdam", "FusedAdamW", "FusedLAMB", "FusedLARS", "FusedSGD", "MultiTensorOptimizer"]
