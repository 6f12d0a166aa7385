"""Optimizers that update all parameters at once: SGD, Adam and AdamW as torch's, and LAMB and LARS."""

from __future__ import annotations

from accel.optim.adam import FusedAdam, FusedAdamW, FusedLAMB
from accel.optim.base import MultiTensorOptimizer
from accel.optim.muon import Muon
from accel.optim.sgd import FusedLARS, FusedSGD

__all__ = ["FusedAdam", "FusedAdamW", "FusedLAMB", "FusedLARS", "FusedSGD", "MultiTensorOptimizer", "Muon"]
