"""A plain call that can't be made again is no fault of the strategy: the guard then compares nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import strategies
from accel.run import Run
from accel.strategies.base import Exactness, Strategy


class Harmless(Strategy):
    """Calls the model as it is."""

    name = "harmless"
    summary = "nothing"
    treats = frozenset()
    exactness = Exactness.REORDERED

    def refusal(self, run: Run) -> str:
        return ""

    def enable(self, run: Run, setting: Any) -> None:
        run.gate.add(self.name, lambda call: call)

    def disable(self, run: Run) -> None:
        run.gate.remove(self.name)


class Reentrant(nn.Module):
    """Repeats a layer in the backward pass, the old way, which bears no `autograd.grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.second(checkpoint(torch.nn.Sequential(self.first, nn.ReLU()), x, use_reentrant=True))


def test_reentrant_checkpointing_is_not_the_candidates_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "REGISTRY", [Harmless])
    loader: Any = DataLoader(TensorDataset(torch.randn(64, 3), torch.randn(64, 2)), batch_size=4)
    model = Reentrant()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60, cache=False)
    for _ in range(4):
        for x, target in loader:
            optimizer.zero_grad()
            (model(x.requires_grad_()) - target).square().mean().backward()
            optimizer.step()
    (row,) = accel.explain(model).rows
    accel.undo(model)
    assert row.status == "not tried", row
    assert "the guard could compare nothing: the plain call can't be replayed: " in row.why
    assert "checkpoint" in row.why.lower()
