"""Hooks of the user's on a decorated optimizer's step, and classes whose step calls their base's: torch runs all hooks
for both.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel.amp import decorate, master_params
from tests.accel.amp.amp_models import OPTIMIZERS, batches, by_hand, loss_of, mlp

NAMES = ["SGD", "AdamW fused", "FusedSGD"]


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for x, target in batches(steps, 8):
        optimizer.zero_grad()
        loss_of(model(x), target).backward()
        optimizer.step()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_before", [True, False])
def test_weights_that_a_hook_clamps_after_the_step_stay_so(name: str, is_before: bool) -> None:
    model: Any = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())

    @torch.no_grad()
    def clamp(own: Any, args: Any, kwargs: Any) -> None:
        for p in own.param_groups[0]["params"]:
            assert any(p is each for each in model.parameters())
            p.clamp_(-0.0625, 0.0625)

    if is_before:
        optimizer.register_step_post_hook(clamp)
    decorate(model, optimizer, dtype=torch.bfloat16)
    if not is_before:
        optimizer.register_step_post_hook(clamp)
    train(model, optimizer, 2)
    assert all(float(p.detach().abs().max()) <= 0.0625 for p in model.parameters())
    assert all(float(m.abs().max()) <= 0.0628 for m in master_params(optimizer))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_before", [True, False])
def test_gradients_that_a_hook_clears_before_the_step_change_nothing(name: str, is_before: bool) -> None:
    model: Any = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    optimizer.param_groups[0]["weight_decay"] = 0.0

    def clear(own: Any, args: Any, kwargs: Any) -> None:
        for p in model.parameters():
            p.grad.zero_()

    if is_before:
        optimizer.register_step_pre_hook(clear)
    decorate(model, optimizer, dtype=torch.bfloat16)
    if not is_before:
        optimizer.register_step_pre_hook(clear)
    before = [m.detach().clone() for m in master_params(optimizer)]
    train(model, optimizer, 2)
    assert all(map(torch.equal, before, master_params(optimizer)))


class OwnSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OwnAdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


OWN: dict[str, Any] = {
    "SGD": lambda params: OwnSGD(params, 0.05, momentum=0.9),
    "AdamW fused": lambda params: OwnAdamW(params, 0.01, fused=True),
}


@pytest.mark.parametrize("way", ["scale", "scaler", "none"])
@pytest.mark.parametrize("name", OWN)
def test_a_class_that_calls_its_base_s_step_updates_all(name: str, way: str) -> None:
    """The hooks of the inner step once found masters that stood there already, and took their gradients."""
    dtype = torch.bfloat16 if way == "none" else torch.float16
    model: Any = mlp()
    scale = 256.0 if way == "scale" else None
    model, optimizer = decorate(model, OWN[name](model.parameters()), dtype=dtype, loss_scale=scale)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=way == "scaler")
    data = batches(5, 8)
    for number, (x, target) in enumerate([*data[:3], data[0], *data[3:]]):
        optimizer.zero_grad()
        loss = loss_of(model(x), target)
        if number == 3:  # a step that overflows is left out
            if way == "none":
                continue
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(256.0 if way == "scaler" else None)
    expected = by_hand(mlp(), OPTIMIZERS[name], data, dtype, 256.0)
    assert all(map(torch.equal, master_params(optimizer), expected))
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("name", OWN)
def test_a_closure_is_run_once_where_a_class_calls_its_base_s_step(name: str) -> None:
    model: Any = mlp()
    model, optimizer = decorate(model, OWN[name](model.parameters()), dtype=torch.bfloat16)
    data, runs = batches(4, 8), []

    for x, target in data:

        def closure(x: Any = x, target: Any = target) -> Any:
            runs.append(x)
            optimizer.zero_grad()
            loss = loss_of(model(x), target)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert len(runs) == 4
    expected = by_hand(mlp(), OPTIMIZERS[name], data, torch.bfloat16, 256.0)
    assert all(map(torch.equal, master_params(optimizer), expected))
