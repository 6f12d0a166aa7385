"""What each rank of a test does: train until one is sent SIGTERM, and go on with another number of ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.elastic.checkpoint import Checkpoints
from accel.elastic.save_policy import SavePolicy
from accel.elastic.training_state import capture_state, restore_state
from accel.run.ranks import Ranks

SIGNAL_AT = 15


def gathering() -> Callable[[Any], list[Any]]:
    ranks = Ranks()
    ranks.join(time.time())
    return lambda mine: ranks.decide(mine, list, "has not come to save a checkpoint")


def made(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)))
    return model, torch.optim.Adam(model.parameters())


def numbers(model: nn.Module) -> list[float]:
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def until_terminated(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Train; rank 1 is sent SIGTERM. Return where this rank stopped, and what it would have drawn next."""
    gather = gathering()
    model, optimizer = made(rank)
    checkpoints = Checkpoints(folder)
    with SavePolicy(1e6, gather=gather, meeting_s=0.05) as policy:
        for step in range(1, 500):
            optimizer.zero_grad()
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
            if rank == 1 and step == SIGNAL_AT:
                os.kill(os.getpid(), signal.SIGTERM)
            if policy.due():
                with policy.saving():
                    state = capture_state(model, optimizer, step=step, gather=gather)
                    if rank == 0:
                        checkpoints.save(state)
            if policy.stop:
                break
    return {"step": step, "weights": numbers(model), "draw": torch.rand(1).item()}


def resumed(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Go on where `until_terminated` stopped."""
    state = Checkpoints(folder).load_latest(gathering())
    assert state is not None
    model, optimizer = made(rank + 10)
    notes = restore_state(state, model, optimizer)
    return {"step": state["step"], "weights": numbers(model), "draw": torch.rand(1).item(), "notes": notes}
