"""Mixed precision on a GPU: float16 with its loss scale, nothing waited for, steps that overflow, captured steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.amp import DynamicLossScale, decorate
from accel.graphs import capture
from tests.accel.amp.amp_models import OPTIMIZERS, batches, loss_of, mlp
from tests.kernels.conftest import waits_for_nothing

__all__ = ["waits_for_nothing"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),  # a prototype, it says
]

EACH = pytest.mark.parametrize("name", ["AdamW fused", "FusedAdamW", "FusedSGD", "FusedLAMB"])
"""Those that skip a step on the device."""


def on_gpu(name: str, scale: DynamicLossScale) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp().cuda()
    optimizer = OPTIMIZERS[name](model.parameters())
    for group in optimizer.param_groups:
        if "capturable" in group:  # torch captures no Adam without
            group["capturable"] = True
    decorate(model, optimizer, dtype=torch.float16, loss_scale=scale)
    return model, optimizer


def moved(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(x.cuda(), target.cuda()) for x, target in batches(count, 8)]


@EACH
def test_nothing_of_a_step_waits_for_the_device(name: str, waits_for_nothing: Any) -> None:
    model, optimizer = on_gpu(name, DynamicLossScale(init_scale=2.0**10))
    data = moved(5)
    for number, (x, target) in enumerate(data):
        if number < 2:  # kernels are compiled
            _step(model, optimizer, x, target)
        else:
            with waits_for_nothing():
                _step(model, optimizer, x, target)


@EACH
def test_a_step_that_overflows_changes_nothing(name: str) -> None:
    scale = DynamicLossScale(init_scale=2.0**10)
    model, optimizer = on_gpu(name, scale)
    (x, target), *_ = moved(1)
    _step(model, optimizer, x, target)
    before = [each.clone() for each in model.state_dict().values()]
    _step(model, optimizer, x * torch.inf, target)
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert scale.state_dict()["scale"] == 2.0**9


@EACH
def test_a_captured_step_follows_the_loss_scale(name: str) -> None:
    def outcome(captures: bool) -> list[Any]:
        torch.manual_seed(0)
        scale = DynamicLossScale(init_scale=2.0**10, growth_interval=5)
        model, optimizer = on_gpu(name, scale)

        def step(x: Tensor, target: Tensor) -> Tensor:
            return _step(model, optimizer, x, target)

        run: Any = capture(step, strict=True) if captures else step
        seen: list[Any] = []
        for number, (x, target) in enumerate(moved(24)):
            run(x * torch.inf if number in (2, 9, 10, 18) else x, target)
            seen.append(scale.state_dict()["scale"])
        assert not captures or run.replays > 10
        return [seen, *(each.clone() for each in model.state_dict().values())]

    expected, own = outcome(False), outcome(True)
    assert own[0] == expected[0]
    for a, b in zip(own[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model(x), target)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()
