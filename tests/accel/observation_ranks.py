"""What the ranks of test_observation.py do."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import strategies
from accel.profiler.system.meters import DdpWait


def exchanges(rank: int, world: int, every: int, synced: bool) -> float:
    """Update after several batches, with an exchange after each or the last of them; return what was counted."""
    model = DistributedDataParallel(nn.Linear(4, 2))
    seen = DdpWait()
    for step in range(4):
        for micro in range(every):
            model.require_backward_grad_sync = synced or micro == every - 1
            model(torch.ones(2, 4)).sum().backward()
        seen.sample([model], step)
    seen.stop()
    return seen.exchanges()


def waits(rank: int, world: int) -> dict[str, float]:
    """Let rank 0 wait for rank 1's gradients; return its step anatomy, ms."""
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = DataLoader(TensorDataset(torch.randn(72, 4), torch.zeros(72, dtype=torch.long)), batch_size=4)
    _, loader, _ = accel.optimize(model, plain, optimizer, disable=strategies.names(), budget=60)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        time.sleep(0.1 * rank)
        loss.backward()
        optimizer.step()
    found = dict(accel.explain(model).anatomy_before) if rank == 0 else {}
    accel.undo(model)
    return found
