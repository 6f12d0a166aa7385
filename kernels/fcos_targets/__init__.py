"""Target assignment of FCOS and FCOS3D for a whole batch in one pass."""

from __future__ import annotations

from accel.kernels.fcos_targets.inputs import Fcos3dGts, Fcos3dTargets, FcosConfig, FcosGts, FcosPoints, FcosTargets
from accel.kernels.fcos_targets.targets import cost, fcos3d_targets, fcos3d_targets_ref, fcos_targets, fcos_targets_ref

__all__ = [
    "Fcos3dGts",
    "Fcos3dTargets",
    "FcosConfig",
    "FcosGts",
    "FcosPoints",
    "FcosTargets",
    "cost",
    "fcos3d_targets",
    "fcos3d_targets_ref",
    "fcos_targets",
    "fcos_targets_ref",
]
