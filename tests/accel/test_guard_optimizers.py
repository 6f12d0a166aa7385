"""The guard and a loop's optimizers: those that step within the backward pass, and those that a plan leaves alone."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import strategies
from accel.guard import update_guard
from accel.guard.watch import Watch
from accel.run.context import Observed
from accel.run.gate import Gate
from accel.session.plan_check import PlanCheck
from accel.session.replays import Replays
from accel.session.step_watch import StepWatch
from accel.strategies.fused_optimizer import FusedOptimizer


def test_updates_within_the_backward_pass_are_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would look at the gradients of all, and call again with weights of which some are new."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizers = [torch.optim.SGD([parameter], 0.1) for parameter in model.parameters()]
    gate: Any = Gate(model, ["one"])
    gate.add("one", lambda call: call)
    run = SimpleNamespace(
        model=model, device=torch.device("cpu"), gate=gate, optimizers=optimizers, observed=Observed()
    )
    switchboard = SimpleNamespace(suspects=lambda: ["one"], active={}, trip=lambda why: pytest.fail(why))
    runner: Any = StepWatch(Replays(run, switchboard, SimpleNamespace()))  # type: ignore[arg-type]
    looked_at: list[Optimizer] = []
    monkeypatch.setattr(Watch, "gradients_are_finite", lambda self, optimizer: not looked_at.append(optimizer))
    for optimizer, parameter in zip(optimizers, model.parameters(), strict=True):
        parameter.register_post_accumulate_grad_hook(lambda _, own=optimizer: runner.before_update(own))
    runner.begin_step()
    loss: Tensor = runner.call(model.forward, (torch.randn(5, 3),), {}).square().sum()
    runner.backward_begins()
    loss.backward()
    runner.backward_ended([loss])
    assert looked_at == []
    runner.begin_step()  # a loop that updates after the pass is looked at as ever
    outputs = runner.call(model.forward, (torch.randn(5, 3),), {})
    assert outputs.requires_grad
    runner.before_update(optimizers[0])
    assert looked_at == optimizers


class Own(Optimizer):
    """An optimizer of the user's, with a counter and a list beside its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        self.log: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.log.append(1)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad


def test_an_optimizer_that_a_plan_leaves_alone_is_not_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "REGISTRY", [FusedOptimizer])
    compared: list[str] = []
    real = update_guard.updated

    def updated(optimizer: Optimizer) -> list[Tensor]:
        compared.append(type(optimizer).__name__)
        return real(optimizer)

    monkeypatch.setattr(update_guard, "updated", updated)
    loader: Any = DataLoader(TensorDataset(torch.randn(64, 3), torch.randn(64, 2)), batch_size=4)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    usual, own = torch.optim.AdamW(model[0].parameters()), Own(model[1].parameters())
    model, loader, usual = accel.optimize(model, loader, usual, budget=60, cache=False, enable=("fused_optimizer",))
    for _ in range(4):
        for x, target in loader:
            (model(x) - target).square().mean().backward()
            for optimizer in (usual, own):
                optimizer.step()
                optimizer.zero_grad()
    accel.undo(model)
    assert set(compared) == {"AdamW"}
    assert len(own.log) == 4 * len(loader)


def test_a_comparison_tells_what_its_last_step_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has work in it that is done once."""
    monkeypatch.setattr(strategies, "REGISTRY", [FusedOptimizer])
    real_update, real_finding = update_guard.updated, PlanCheck.take_finding
    updates: list[float] = []
    findings: list[Any] = []

    def updated(optimizer: Optimizer) -> list[Tensor]:
        time.sleep(0.0 if updates else 0.3)
        updates.append(time.perf_counter())
        return real_update(optimizer)

    def take_finding(runner: PlanCheck) -> Any:
        finding = real_finding(runner)
        findings.extend([] if finding is None else [finding])
        return finding

    monkeypatch.setattr(update_guard, "updated", updated)
    monkeypatch.setattr(PlanCheck, "take_finding", take_finding)
    loader: Any = DataLoader(TensorDataset(torch.randn(128, 3), torch.randn(128, 2)), batch_size=4)
    model = nn.Linear(3, 2)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, loader, optimizer = accel.optimize(
        model, loader, optimizer, budget=60, cache=False, enable=("fused_optimizer",)
    )
    for x, target in loader:
        (model(x) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    accel.undo(model)
    assert len(updates) >= 4
    assert 0 < findings[0].seconds < 0.3


def test_options_differ_where_a_path_was_switched() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    before = update_guard.options_of(optimizer)
    assert not update_guard.differ(before, update_guard.options_of(optimizer))
    optimizer.param_groups[0]["foreach"] = True
    assert update_guard.differ(before, update_guard.options_of(optimizer))


def test_layers_with_a_group_each_share_the_elements_that_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_guard, "_ELEMENTS", 100)
    parameters = [nn.Parameter(torch.ones(40)) for _ in range(10)]
    optimizer = torch.optim.AdamW([{"params": [parameter]} for parameter in parameters])
    assert len(update_guard.start_of(optimizer)) == 2
    assert len(update_guard.updated(optimizer)) == 2


def test_each_path_is_stepped_with_one_parameter_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of other options take other paths."""
    monkeypatch.setattr(update_guard, "_ELEMENTS", 10)
    groups: Any = [{"params": [nn.Parameter(torch.ones(40))], "weight_decay": each} for each in (0.0, 0.1, 0.1)]
    assert len(update_guard.start_of(torch.optim.AdamW(groups))) == 2


def test_what_is_stepped_does_not_depend_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan switches the path between the two updates that are compared."""
    monkeypatch.setattr(update_guard, "_ELEMENTS", 10)
    groups: Any = [{"params": [nn.Parameter(torch.ones(40))], "foreach": each} for each in (None, True)]
    optimizer = torch.optim.AdamW(groups)
    before = len(update_guard.updated(optimizer))
    optimizer.param_groups[0]["foreach"] = True
    assert len(update_guard.updated(optimizer)) == before
