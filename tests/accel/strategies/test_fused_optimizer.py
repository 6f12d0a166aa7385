"""The strategy in a loop that loads a state or takes another optimizer: it goes on, or says that it does not."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

import accel
from accel import entry
from accel.profiler.experiments import update_path
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
    assert entry.MODELS[model].session.active == {"fused_optimizer": "fused"}
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


def _turned(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.data = p.data.T.contiguous().T if p.dim() == 2 else p.data


def _a_tensor_for_weight_decay(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["weight_decay"] = torch.tensor(0.01)


@pytest.mark.parametrize(
    ("change", "why"),
    [(_turned, "a weight, its gradient and its state are no longer of"), (_a_tensor_for_weight_decay, "a number of")],
)
def test_after_a_change_that_the_path_does_not_bear_it_is_undone(change: Any, why: str) -> None:
    """Weights moved by other weights' gradients, or the step raised."""
    model, loader, optimizer = kept()
    loop = training(model, loader, optimizer)
    change(model, optimizer)
    plain = copy.deepcopy(model)
    of_plain = torch.optim.AdamW(plain.parameters(), 0.01)
    state = copy.deepcopy(optimizer.state_dict())
    of_plain.load_state_dict(state)
    x, target = torch.randn(8, 6), torch.arange(8)
    for each, its in ((model, optimizer), (plain, of_plain)):
        its.zero_grad()
        loss_of(each(x), target).backward()
        its.step()
    for p, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, expected)
    advance(loop, 400)
    row = {row.name: row for row in accel.explain(model).rows}["fused_optimizer"]
    assert row.status == "undone"
    assert row.why.startswith(f"no optimizer takes that path any more: {why}")
    assert paths(optimizer) == (None, None)
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


def test_hooks_of_the_loop_get_the_checkpoint_of_its_own_path() -> None:
    """One that wrapped it in a dict of its own made `state_dict()` raise."""
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters(), fused=None)
    optimizer.register_state_dict_post_hook(lambda _, state: {"inner": state})
    run: Any = SimpleNamespace(optimizers=[optimizer])
    strategy = FusedOptimizer()
    strategy.enable(run, "fused")
    assert optimizer.param_groups[0]["fused"] is True
    assert optimizer.state_dict()["inner"]["param_groups"][0]["fused"] is None
    strategy.disable(run)


def test_counters_that_the_loop_has_put_on_the_cpu_follow_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_path, "_signature", lambda optimizer: None)  # fake tensors have no addresses
    with FakeTensorMode():
        params = [nn.Parameter(torch.randn(3, device="cuda")) for _ in range(2)]
        optimizer = torch.optim.Adam(params)
        for p in params:
            optimizer.state[p] = {"step": torch.tensor(3.0), "exp_avg": torch.zeros_like(p)}
            p.grad = torch.zeros_like(p)
        strategy, run = FusedOptimizer(), SimpleNamespace(optimizers=[optimizer])
        strategy.enable(run, "fused")  # type: ignore[arg-type]
        for p in params:
            optimizer.state[p]["step"] = torch.tensor(0.0)
        strategy._paths._gradients_ready(optimizer)
        assert {optimizer.state[p]["step"].device.type for p in params} == {"cuda"}


def test_a_checkpoint_of_a_gpu_has_the_step_counters_of_the_plain_path() -> None:
    """torch leaves a counter that it loads on its device, and a plain update then waits for each of them twice."""
    with FakeTensorMode():
        params = [nn.Parameter(torch.randn(3, device="cuda")) for _ in range(4)]
        optimizer = torch.optim.Adam(params[:3])
        for p in params[:2]:  # the third has no state yet
            optimizer.state[p] = {"step": torch.tensor(3.0), "exp_avg": torch.zeros_like(p)}
        strategy, run = FusedOptimizer(), SimpleNamespace(optimizers=[optimizer])
        strategy.enable(run, "fused")  # type: ignore[arg-type]
        optimizer.add_param_group({"params": params[3:], "fused": True})  # the loop's own choice
        optimizer.state[params[3]] = {"step": torch.tensor(0.0, device="cuda")}
        saved = optimizer.state_dict()
        own = {number: optimizer.state[params[number]] for number in saved["state"]}
        assert {number: each["step"].device.type for number, each in saved["state"].items()} == {
            0: "cpu",
            1: "cpu",
            3: "cuda",
        }
        assert [group["fused"] for group in saved["param_groups"]] == [None, True]
        assert all(saved["state"][number]["exp_avg"] is own[number]["exp_avg"] for number in range(2))
        assert all(state["step"].device.type == "cuda" for state in own.values())  # the run goes on along its path
        strategy.disable(run)  # type: ignore[arg-type]
        assert optimizer.state_dict()["state"][0]["step"] is optimizer.state[params[0]]["step"]


def test_a_checkpoint_of_the_cpu_holds_the_optimizers_own_counters() -> None:
    model, _, optimizer = kept()
    saved = optimizer.state_dict()["state"]
    assert all(saved[n]["step"] is optimizer.state[p]["step"] for n, p in enumerate(model.parameters()))
    accel.undo(model)
