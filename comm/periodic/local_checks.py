"""What local SGD refuses, and why."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from accel.comm.compression.momentum import MomentumCorrection
from accel.comm.hooks import CommState

_WITHIN = ("host", "rank")
_SCALER = ("step", "get_scale", "state_dict", "load_state_dict")
"""What is needed of a scaler."""


def check_arguments(start_step: int, every: int, within: str) -> None:
    """Raise ValueError unless the numbers are in range."""
    if start_step < 0:
        raise ValueError(f"start_step must be at least 0, got {start_step}")
    if every < 1:
        raise ValueError(f"every must be at least 1 step, got {every}")
    if within not in _WITHIN:
        raise ValueError(f'within must be "host" or "rank", got {within!r}')


def check_parts(ddp: Any, optimizer: Any, dense: Any, scaler: Any) -> None:
    """Raise ValueError unless module, optimizer, dense state and scaler can go together."""
    if not isinstance(ddp, DistributedDataParallel):
        raise ValueError(
            f"LocalSGD needs a DistributedDataParallel module, got {type(ddp).__name__}; sharded weights "
            "differ by rank and can't be averaged"
        )
    if ddp._comm_hooks:
        raise ValueError("the module must have no communication hook yet; pass its CommState as dense= instead")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise ValueError(
            "ZeroRedundancyOptimizer can't take local steps: each rank steps its own part of the weights; use "
            "the plain optimizer"
        )
    if dense is not None and not isinstance(dense, CommState):
        raise ValueError(f"dense must be a CommState, got {type(dense).__name__}; AutoComm switches hooks by itself")
    if dense is not None and isinstance(dense.compressor, MomentumCorrection) and dense.compressor.momentum:
        name = type(dense.compressor).__name__
        raise ValueError(
            f"{name} with momentum takes it from the optimizer, which local steps need; pass "
            f"{name}(..., momentum=False)"
        )
    if scaler is not None and not all(hasattr(scaler, name) for name in _SCALER):
        raise ValueError(
            f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}; a model that is decorated by "
            "accel.amp needs none"
        )


def difference(own: tuple[int, int, int], theirs: tuple[int, int, int], rank: int) -> str:
    """Return what to say where ranks differ in (steps, backward passes, fingerprint)."""
    if theirs[:2] != own[:2]:
        return (
            f"ranks must come to an averaging after as many steps and backward passes, got {own[0]} and {own[1]} "
            f"here and {theirs[0]} and {theirs[1]} on rank {rank}; if a GradScaler skips steps, pass it as scaler="
        )
    return (
        f"ranks must have the same parameters and optimizer state at an averaging, got others on rank {rank} than "
        "here; give every rank the same parameter groups, and load checkpoints on all ranks or on none"
    )
