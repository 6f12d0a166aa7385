"""SimOTA label assignment for a whole batch: which anchor learns which ground truth."""

from __future__ import annotations

from accel.kernels.simota.assign import cost, simota_assign
from accel.kernels.simota.inputs import Assignment, Rules

__all__ = ["Assignment", "Rules", "cost", "simota_assign"]
