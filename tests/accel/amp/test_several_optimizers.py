"""One loss scale of several optimizers: which gradients wait for their step, also where each steps within the pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.amp import DynamicLossScale, decorate, master_params, undecorate
from tests.accel.amp.amp_models import OPTIMIZERS, batches, loss_of, mlp

NAMES = ["SGD", "AdamW fused", "FusedSGD"]


def pair(name: str, level: str, scale: DynamicLossScale) -> tuple[list[Any], list[Any]]:
    """Return two models and their optimizers, decorated together."""
    models = [nn.Linear(4, 2, bias=False) for _ in range(2)]
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in models]
    decorate(models, optimizers, level=level, dtype=torch.float16, loss_scale=scale)
    return models, optimizers


def train(model: Any, optimizer: Any, factor: float, *, set_to_none: bool = True) -> None:
    optimizer.zero_grad(set_to_none=set_to_none)
    (model(torch.ones(3, 4)).sum() * factor).backward()
    optimizer.step()


def leave(optimizer: Any) -> None:
    pass


def zero(optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("afterwards", [leave, zero])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_an_earlier_phase_do_not_hold_the_scale(
    name: str, level: str, afterwards: Callable[[Any], None]
) -> None:
    """They once counted as waiting from the next backward pass on: after an overflow no step came through any more."""
    scale = DynamicLossScale(initial=2.0**16)
    (first, second), (own, other) = pair(name, level, scale)
    train(second, other, 1e-4)
    afterwards(other)
    before = first.weight.detach().clone()
    for _ in range(12):
        train(first, own, 100.0)
    assert not torch.equal(first.weight, before)
    scale.settle()
    assert 2.0**4 < float(scale.value) < 2.0**10  # 3 rows, each 100
    undecorate(first)
    assert second.weight.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_gradients_that_are_zeroed_do_not_hold_the_scale(name: str) -> None:
    """As in a GAN whose critic gets gradients from the generator's pass, and whose gradients are zeroed in place."""
    scale = DynamicLossScale(initial=8.0, interval=1, most=2.0**10)
    (make, critic), (first, second) = pair(name, "O2", scale)
    both = nn.Linear(2, 4).requires_grad_(False)
    for _ in range(6):
        second.zero_grad(set_to_none=False)
        critic(both(make(torch.ones(3, 4)).detach())).sum().backward()
        second.step()
        first.zero_grad(set_to_none=False)
        critic(both(make(torch.ones(3, 4)))).sum().backward()
        first.step()
    scale.settle()
    assert float(scale.value) >= 2.0**8


@pytest.mark.parametrize("at", ["before", "after"])
def test_gradients_that_wait_hold_the_scale(at: str) -> None:
    """Another optimizer overflows meanwhile; what waits is divided by what it was multiplied by."""
    scale = DynamicLossScale(initial=2.0**10)
    (first, second), (own, other) = pair("SGD without momentum", "O2", scale)
    before = master_params(own)[0].clone()
    if at == "after":
        train(second, other, torch.inf)
    first(torch.ones(3, 4)).sum().backward()
    for _ in range(3):
        train(second, other, torch.inf)
    assert float(scale.value) == 2.0 ** (10 if at == "before" else 9)
    own.step()
    torch.testing.assert_close(master_params(own)[0], before - 0.05 * 3)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", NAMES)
def test_optimizers_may_step_within_the_backward_pass(name: str, level: str, set_to_none: bool) -> None:
    """One for each parameter, as soon as its gradient is there; all but the first to step once were refused."""
    outcomes, scales = [], []
    for within in (False, True):
        model, scale = mlp(), DynamicLossScale(initial=2.0**8, interval=2)
        optimizers = [OPTIMIZERS[name]([p]) for p in model.parameters()]
        decorate(model, optimizers, level=level, dtype=torch.float16, loss_scale=scale)
        for p, optimizer in zip(model.parameters(), optimizers, strict=True) if within else ():
            p.register_post_accumulate_grad_hook(stepping(optimizer, set_to_none))
        for number, (x, target) in enumerate(batches(7, 8)):
            loss = loss_of(model(x), target)
            (loss * torch.inf if number == 3 else loss).backward()
            for optimizer in () if within else optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
            assert not scale.came_through
        scale.settle()
        scales.append(scale.state_dict())
        outcomes.append([m.detach().clone() for optimizer in optimizers for m in master_params(optimizer)])
    assert all(map(torch.equal, *outcomes))
    assert scales[0] == scales[1]
    assert scales[0]["scale"] == 2.0**9  # twice larger after 2 steps, half of that, and twice larger again


def stepping(optimizer: Any, set_to_none: bool) -> Callable[[Tensor], None]:
    def step(p: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)

    return step


@pytest.mark.parametrize(("level", "has_scaler"), [("O1", False), ("O2", False), ("O2", True)])
def test_a_first_step_that_overflows_leaves_no_momentum(level: str, has_scaler: bool) -> None:
    """torch's fused SGD makes the buffers all the same, and once left in them what lay in that memory."""
    outcomes = []
    for overflows in (False, True):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, fused=True)
        decorate(model, optimizer, level=level, dtype=torch.float16, loss_scale=None if has_scaler else 64.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=has_scaler)
        for number, (x, target) in enumerate(batches(4, 8)):
            if number == 0 and not overflows:
                continue
            optimizer.zero_grad()
            loss = scaler.scale(loss_of(model(x), target))
            (loss * torch.inf if number == 0 else loss).backward()
            scaler.step(optimizer)
            scaler.update(64.0)
            if number == 0:
                assert not any("momentum_buffer" in own for own in optimizer.state.values())
        outcomes.append([m.detach().clone() for m in master_params(optimizer)])
    assert all(map(torch.equal, *outcomes))
