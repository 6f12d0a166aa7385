"""Loops over a model that is captured on the stand-in, compared with the eager one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from accel.graphs import ModelCalls
from accel.profiler.loop import callslot
from tests.accel.graphs.tape import TapeRecorder


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))


class Tied(nn.Module):
    """Has a weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).tanh())
        return out


def batch(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


def taped(model: Any, **options: Any) -> ModelCalls:
    """Capture a model's calls on a tape."""
    calls = ModelCalls(model, recorder=lambda device: TapeRecorder(), **options)
    callslot.fill(model, callslot.SlotCall(calls.wrap(model._call_impl)))
    return calls


Loop = Callable[[Any, torch.optim.Optimizer], list[Any]]


def both(loop: Loop, make: Callable[[], Any] = network, **options: Any) -> ModelCalls:
    """Run a loop with the eager and with the captured model, and compare all bits."""

    def new() -> Any:
        torch.manual_seed(0)
        return make()

    def outcome(model: Any) -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False, momentum=0.9)
        torch.manual_seed(1)
        results = loop(model, optimizer)
        gradients = [p.grad for p in model.parameters()]
        return tree_leaves([results, gradients, list(model.state_dict().values()), torch.get_rng_state()])

    expected = outcome(new())
    model = new()
    calls = taped(model, **options)
    found = outcome(model)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    return calls


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int, rows: int = 8) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(batch(rows, seed)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def squares_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    """Return a training step whose loss is the mean square of the outputs."""

    def whole(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return whole
