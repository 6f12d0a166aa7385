"""Optimizers that update all parameters at once: SGD, Adam and AdamW as torch's, and LAMB and LARS."""

from __future__ import annotations

from accel.optim.base import MultiTensorOptimizer
from accel.optim.fused import FusedAdam, FusedAdamW, FusedLAMB, FusedLARS, FusedSGD
from accel.optim.muon import Muon

__all__ = ["FusedAdam", "FusedAdamW", "FusedLAMB", "FusedLARS", "FusedSGD", "MultiTensorOptimizer", "Muon"]
