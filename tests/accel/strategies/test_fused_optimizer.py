"""The strategy in a loop that loads a state or takes another optimizer: it goes on, or says that it does not."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import accel
from accel import entry
from accel.strategies.fused_optimizer import FusedOptimizer
from tests.accel.loops import advance, loss_of, make_loader, training


def kept() -> tuple[Any, Any, Any]:
    """A run that keeps the strategy, taken over from a plan."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer: Any = torch.optim.AdamW(model.parameters(), 0.01)
    plan = accel.Plan(
        fingerprint=accel.search.plan.fingerprint(model), model="Sequential", strategies={"fused_optimizer": "fused"}
    )
    model, loader, optimizer = accel.optimize(model, make_loader(), optimizer, plan=plan)
    advance(training(model, loader, optimizer), 60)
    assert entry._optimized[model].session.active == {"fused_optimizer": "fused"}
    return model, loader, optimizer


def paths(optimizer: Optimizer) -> tuple[Any, Any]:
    group = optimizer.param_groups[0]
    return group["foreach"], group["fused"]


def test_a_loaded_state_goes_on_along_the_fused_path() -> None:
    model, loader, optimizer = kept()
    state = copy.deepcopy(optimizer.state_dict())
    assert not state["param_groups"][0]["fused"]
    state["param_groups"][0]["lr"] = 0.005
    optimizer.load_state_dict(state)
    advance(training(model, loader, optimizer), 60)
    assert paths(optimizer) == (False, True)
    assert not optimizer.state_dict()["param_groups"][0]["fused"]  # as the loop's own says
    assert {row.name: row.status for row in accel.explain(model).rows}["fused_optimizer"] == "kept"
    accel.undo(model)
    assert paths(optimizer) == (None, None)
    assert optimizer.param_groups[0]["lr"] == 0.005


def test_after_another_optimizer_has_come_it_is_reported_as_undone() -> None:
    model, loader, optimizer = kept()
    del optimizer
    other = torch.optim.AdamW(model.parameters(), 0.01)
    advance(training(model, loader, other, loss=loss_of), 400)
    row = {row.name: row for row in accel.explain(model).rows}["fused_optimizer"]
    assert row.status == "undone"
    assert row.why.startswith("no optimizer takes that path any more")
    assert paths(other) == (None, None)
    accel.undo(model)


def test_on_a_gpu_foreach_is_the_default_and_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    fused, plain = torch.optim.AdamW(parameters), torch.optim.NAdam(parameters)
    strategy = FusedOptimizer()
    for cuda, optimizer, settings in (
        (False, fused, ["fused", "foreach"]),
        (True, fused, ["fused"]),
        (False, plain, ["foreach"]),
        (True, plain, []),
    ):
        run: Any = SimpleNamespace(optimizers=[optimizer], cuda=cuda)
        assert strategy.settings(run) == settings
        assert bool(strategy.refusal(run)) == (not settings)
