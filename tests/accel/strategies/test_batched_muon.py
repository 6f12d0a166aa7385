"""batched_muon in loops of torch.optim.Muon: the same weights, the same checkpoints, and nothing left after it."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import _muon

import accel
from accel import entry
from accel.exactness import Exactness
from accel.guard import update_guard
from accel.kernels import optimizers
from accel.strategies.batched_muon import BatchedMuon
from tests.accel.loops import advance, make_loader, training

PLAIN = _muon.muon


def made(**options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), *[nn.Linear(8, 8) for _ in range(3)], nn.Linear(8, 3))
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01, **options)
    rest = torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1])
    return model, optimizer, SimpleNamespace(optimizers=[optimizer, rest], cuda=False)


def step(model: nn.Module, optimizer: Any) -> None:
    x = torch.arange(30.0).sin().view(5, 6)
    optimizer.zero_grad()
    (model(x) ** 2).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("options", [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}])
def test_the_weights_are_those_of_torch_and_off_is_off(options: dict[str, Any]) -> None:
    model, optimizer, run = made(**options)
    plain, of_plain, _ = made(**options)
    strategy = BatchedMuon()
    assert not strategy.refusal(run)
    strategy.enable(run, None)
    batches: list[int] = []
    real = optimizers.muon_update
    optimizers.muon_update = lambda params, *args, **more: (batches.append(len(params)), real(params, *args, **more))  # type: ignore[assignment]
    try:
        for _ in range(3):
            step(model, optimizer)
            step(plain, of_plain)  # another model's optimizer in the same process goes on as it did
    finally:
        optimizers.muon_update = real
    assert batches == [5, 5, 5]
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0.0, atol=3 * 0.01 * 0.05)
    assert not strategy.failure(run)
    strategy.disable(run)
    assert _muon.muon is PLAIN
    assert type(optimizer.param_groups[0]["ns_coefficients"]) is tuple
    step(model, optimizer)


def test_a_checkpoint_says_nothing_of_it_and_a_loaded_one_goes_on() -> None:
    model, optimizer, run = made()
    strategy = BatchedMuon()
    strategy.enable(run, None)
    step(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    assert type(state["param_groups"][0]["ns_coefficients"]) is tuple
    assert b"accel" not in pickle.dumps(state)
    assert b"accel" not in pickle.dumps(copy.deepcopy(optimizer).state_dict())
    optimizer.load_state_dict(state)
    step(model, optimizer)
    assert type(optimizer.param_groups[0]["ns_coefficients"]) is not tuple
    run.optimizers = run.optimizers[1:]
    assert "any more" in strategy.failure(run)
    strategy.disable(run)


def test_two_models_share_the_function() -> None:
    (_, _, one), (_, _, two) = made(), made()
    first, second = BatchedMuon(), BatchedMuon()
    first.enable(one, None)
    second.enable(two, None)
    first.disable(one)
    assert _muon.muon is not PLAIN
    second.disable(two)
    second.disable(two)
    assert _muon.muon is PLAIN


def test_it_does_not_apply() -> None:
    model, optimizer, run = made()
    assert "no torch.optim.Muon" in BatchedMuon().refusal(SimpleNamespace(optimizers=run.optimizers[1:]))  # type: ignore[arg-type]
    model.bfloat16()
    assert not BatchedMuon().refusal(run)
    optimizer.param_groups[0]["nesterov"] = False
    assert "scales the momentum of bfloat16 weights" in BatchedMuon().refusal(run)
    for p in model.parameters():  # torch's own step does
        p.grad = torch.ones_like(p)
    optimizer.step()
    momentum = optimizer.state[model[0].weight]["momentum_buffer"]
    assert abs(float(momentum.float().norm()) - 1) < 0.01


def test_the_guard_compares_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """By bfloat16's tolerance, since torch's Muon rounds to it; another formula is seen."""
    model, optimizer, run = made(weight_decay=0.0)
    step(model, optimizer)
    strategy = BatchedMuon()

    def compared() -> Any:
        start, plain = update_guard.start_of(optimizer), update_guard.updated(optimizer)
        strategy.enable(run, None)
        candidate = update_guard.updated(optimizer)
        strategy.disable(run)
        coarsest = update_guard.coarsest_of(optimizer)
        return update_guard.compare(plain, candidate, start, Exactness.REORDERED, coarsest)

    assert not compared().problem
    real = optimizers.muon_update

    def wrong(*args: Any, **options: Any) -> None:
        real(*args, **{**options, "lr": 1.2 * options["lr"]})

    monkeypatch.setattr(optimizers, "muon_update", wrong)
    assert "its update is off by" in compared().problem


def test_a_run_takes_it_over_from_a_plan() -> None:
    model, optimizer, _ = made()
    plan = accel.Plan(
        fingerprint=accel.search.plan.fingerprint(model), model="Sequential", strategies={"batched_muon": None}
    )
    model, loader, optimizer = accel.optimize(model, make_loader(), optimizer, plan=plan)
    advance(training(model, loader, optimizer), 60)
    run = entry.MODELS[model]
    assert run.session.active == {"batched_muon": None}
    accel.undo(model)
    assert _muon.muon is PLAIN
