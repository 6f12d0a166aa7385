"""Fused optimizers: every parameter of a model in one launch, or in torch's vectorised operators on a CPU."""

from __future__ import annotations

from accel.kernels.optimizers.muon import muon_update
from accel.kernels.optimizers.rules import DTYPES, Batch, Hypers, Kind, Scaling, UpdateOutcome, work_dtype
from accel.kernels.optimizers.update import Updater, cost

__all__ = [
    "DTYPES",
    "Batch",
    "Hypers",
    "Kind",
    "Scaling",
    "UpdateOutcome",
    "Updater",
    "cost",
    "muon_update",
    "work_dtype",
]
