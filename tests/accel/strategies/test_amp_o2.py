"""The strategy that makes calls at O2: it is tried and taken back without a trace, and the loop sees nothing of it."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.amp import decorate
from accel.run import Run
from accel.run.gate import Gate
from accel.strategies import REGISTRY
from accel.strategies.amp_o2 import AmpO2
from tests.accel import loops


def run_of(model: nn.Module, optimizers: list[Any]) -> Run:
    loader = DataLoader(TensorDataset(torch.randn(8, 6)), batch_size=4)
    return Run(model, loader, optimizers, Gate(model, ["amp_o2"]), SimpleNamespace())  # type: ignore[arg-type]


def test_where_it_does_not_apply() -> None:
    model = nn.Linear(6, 2)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    assert AmpO2().refusal(run_of(model, [sgd])) == AmpO2().refusal(run_of(model, [])) == ""
    assert "LBFGS" in AmpO2().refusal(run_of(model, [torch.optim.LBFGS(model.parameters())]))
    own = run_of(model, [sgd])
    own.observed.autocast = True
    assert "autocast of its own" in AmpO2().refusal(own)
    decorated = decorate(nn.Linear(6, 2), dtype=torch.bfloat16)
    assert "decorated by accel.amp already" in AmpO2().refusal(run_of(decorated, []))
    assert "not all fp32 (torch.bfloat16)" in AmpO2().refusal(run_of(model.bfloat16(), [sgd]))


def test_while_it_is_on_the_loop_sees_its_own_model() -> None:
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    run, strategy, kind, seen = run_of(model, [optimizer]), AmpO2(), type(model), []
    model.register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype, module.weight.dtype)))
    strategy.enable(run, None)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    assert strategy.refusal(run) == ""
    assert type(model) is kind and model.weight.dtype == model.weight.grad.dtype == torch.float32
    assert set(optimizer.state[model.weight]) == {"momentum_buffer"}
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    assert type(copy.deepcopy(model)) is kind
    strategy.disable(run)
    model(torch.randn(4, 6))
    assert seen[-1] == (torch.float32, torch.float32)


class Counts(nn.Module):
    """Keeps a mean of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        self.mean.mul_(0.9).add_(y.detach().mean(0))
        return y


def test_a_model_that_writes_to_its_buffers_has_it_undone_without_a_warning() -> None:
    model = Counts()
    run, strategy = run_of(model, []), AmpO2()
    strategy.enable(run, None)
    assert strategy.failure(run) == ""
    model(torch.randn(4, 6))
    assert "writes to 'mean' within its call, in 16 bits" in strategy.failure(run)
    strategy.disable(run)
    assert strategy.failure(run) == ""


class Wide(nn.Module):
    """A model with dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


@torch.no_grad()
def loss_over_the_data(model: nn.Module) -> float:
    model.eval()
    x, target = next(iter(DataLoader(loops.Samples(), batch_size=len(loops.Samples()))))
    return float(loops.loss_of(model(x), target))


@pytest.mark.parametrize("steps", [400])
def test_a_run_that_tries_it(steps: int) -> None:
    others = [strategy.name for strategy in REGISTRY if strategy is not AmpO2]
    model, loader, optimizer = loops.make(kind=Wide)
    model, loader, optimizer = accel.optimize(
        model, loader, optimizer, enable=("amp_o2",), disable=others, budget=100.0, cache=False
    )
    loops.advance(loops.training(model, loader, optimizer), steps)
    row = next(row for row in accel.explain(model).rows if row.name == "amp_o2")
    accel.undo(model)
    assert row.status in ("kept", "undone"), row
    assert not row.why.startswith(("wrong", "failed")), row.why
    assert row.steps > 0
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    plain, _, _ = loops.make(kind=Wide)
    plain.load_state_dict({k: v for k, v in loops.plain_run_of(Wide, steps).items() if k in plain.state_dict()})
    losses = [loss_over_the_data(each) for each in (model, plain)]
    assert abs(losses[0] - losses[1]) < 0.05, losses
