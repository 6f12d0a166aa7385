"""The strategy that decorates at O2: it is tried and taken back without a trace, and its checkpoints are plain."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.run import Run
from accel.run.gate import Gate
from accel.strategies import REGISTRY
from accel.strategies.amp_o2 import AmpO2
from tests.accel import loops


def run_of(model: nn.Module, optimizers: list[Any], *, world_size: int = 1) -> Run:
    loader = DataLoader(TensorDataset(torch.randn(8, 6)), batch_size=4)
    return Run(model, loader, optimizers, Gate(model, []), SimpleNamespace(), world_size=world_size)  # type: ignore[arg-type]


def test_where_it_does_not_apply() -> None:
    model, other = nn.Linear(6, 2), nn.Linear(6, 2)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    assert AmpO2().refusal(run_of(model, [sgd])) == ""
    assert AmpO2().refusal(run_of(model, [])) == "no optimizer of the model has been seen"
    assert "before wrapping it" in AmpO2().refusal(run_of(model, [sgd], world_size=2))
    assert "LBFGS" in AmpO2().refusal(run_of(model, [torch.optim.LBFGS(model.parameters())]))
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.1)
    assert "parameters of other models" in AmpO2().refusal(run_of(model, [both]))
    own = run_of(model, [sgd])
    own.observed.autocast = True
    assert "autocast of its own" in AmpO2().refusal(own)
    assert "not all fp32 (torch.bfloat16)" in AmpO2().refusal(run_of(model.bfloat16(), [sgd]))


def test_while_it_is_on_checkpoints_are_the_plain_loops() -> None:
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    run, strategy = run_of(model, [optimizer]), AmpO2()
    strategy.enable(run, None)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    saved, weights = optimizer.state_dict(), model.state_dict()
    assert strategy.refusal(run) == ""
    assert model.weight.dtype == torch.bfloat16
    assert {name for own in saved["state"].values() for name in own} == {"momentum_buffer"}
    assert "master" in optimizer.state[model.weight]
    strategy.disable(run)
    assert torch.equal(model.weight, weights["weight"])
    assert model.weight.dtype == torch.float32
    assert "master" in saved["state"] or set(optimizer.state[model.weight]) == {"momentum_buffer"}


def test_an_optimizer_that_comes_later_is_reported() -> None:
    """It would update 16-bit weights, with no master weights."""
    model = nn.Linear(6, 2)
    run, strategy = run_of(model, [torch.optim.SGD(model.parameters(), 0.1)]), AmpO2()
    strategy.enable(run, None)
    assert strategy.failure(run) == ""
    later = torch.optim.SGD(model.parameters(), 0.1)  # a run keeps no optimizer alive
    run.optimizers.append(later)  # type: ignore[union-attr]
    assert "came after the model was decorated" in strategy.failure(run)
    strategy.disable(run)
    strategy.enable(run, None)
    assert strategy.failure(run) == ""
    strategy.disable(run)
    assert model.weight.dtype == torch.float32


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


def test_only_by_name() -> None:
    assert AmpO2.opt_in
    model, loader, optimizer = loops.make(kind=Wide)
    model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="lossy", cache=False)
    loops.advance(loops.training(model, loader, optimizer), 1)
    row = next(row for row in accel.explain(model).rows if row.name == "amp_o2")
    accel.undo(model)
    assert row.status == "not allowed"
    assert "enable=('amp_o2',) tries it" in row.why


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
