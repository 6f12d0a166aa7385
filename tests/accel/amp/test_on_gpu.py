"""Mixed precision on a GPU: nothing is waited for, and captured steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.amp import decorate
from accel.graphs import capture
from tests.accel.amp.amp_models import OPTIMIZERS, batches, loss_of, mlp
from tests.kernels.conftest import waits_for_nothing

__all__ = ["waits_for_nothing"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),  # a prototype, it says
]

EACH = pytest.mark.parametrize("name", ["AdamW fused", "FusedAdamW", "FusedSGD", "FusedLAMB"])


def on_gpu(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp().cuda()
    optimizer = OPTIMIZERS[name](model.parameters())
    for group in optimizer.param_groups:
        if "capturable" in group:  # torch captures no Adam without
            group["capturable"] = True
    decorate(model, optimizer, dtype=torch.bfloat16)
    return model, optimizer


def moved(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(x.cuda(), target.cuda()) for x, target in batches(count, 8)]


@EACH
def test_nothing_of_a_step_waits_for_the_device(name: str, waits_for_nothing: Any) -> None:
    model, optimizer = on_gpu(name)
    data = moved(5)
    for number, (x, target) in enumerate(data):
        if number < 2:  # kernels are compiled
            _step(model, optimizer, x, target)
        else:
            with waits_for_nothing():
                _step(model, optimizer, x, target)


@EACH
def test_a_captured_step_is_that_of_the_loop(name: str) -> None:
    def outcome(captures: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, optimizer = on_gpu(name)

        def step(x: Tensor, target: Tensor) -> Tensor:
            return _step(model, optimizer, x, target)

        run: Any = capture(step, strict=True) if captures else step
        for x, target in moved(24):
            run(x, target)
        assert not captures or run.replays > 10
        return [each.clone() for each in model.state_dict().values()]

    for a, b in zip(outcome(True), outcome(False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model(x), target)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()
