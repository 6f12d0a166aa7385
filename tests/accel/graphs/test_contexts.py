"""What stands around a call: a default device, autocast that its backward pass is not under."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.accel.graphs.model_loops import batch, both, loop_of, network, step, taped_step

pytestmark = pytest.mark.filterwarnings("ignore:accel.graphs.capture:RuntimeWarning")


@pytest.mark.parametrize("is_set", [True, False])
def test_a_default_device_does_not_keep_a_model_eager(is_set: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Torch 2.9 can't tell the default device any more once it has been set to None.
    monkeypatch.setattr(torch, "_GLOBAL_DEVICE_CONTEXT", threading.local())

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        if not is_set:
            with torch.device("cpu"):
                return [step(model, optimizer, seed) for seed in range(8)]
        torch.set_default_device("cpu")
        try:
            return [step(model, optimizer, seed) for seed in range(8)]
        finally:
            torch.set_default_device(None)

    assert both(loop, warmup=2).replays == 6


def test_another_default_device_has_a_graph_of_its_own() -> None:
    run = taped_step(lambda x: x.to(torch.empty(0).device) * 2, modules=[], warmup=0)
    run(torch.ones(2))
    run(torch.ones(2))
    with torch.device("meta"):
        assert run(torch.ones(2, device="cpu")).is_meta
    assert run.captures == 2


def test_other_modes_still_see_each_operator() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        with torch.device("cpu"), Mode():
            return loop_of(4)(model, optimizer)

    assert both(loop, warmup=0).captures == 0
    assert nn.functional.linear in seen


class Islands(nn.Module):
    """Has a part that autocast is off for."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the second part in float32."""
        y = self.one(x)
        with torch.autocast("cpu", enabled=False):
            out: Tensor = self.two(y.float())
        return out


@pytest.mark.parametrize("make", [Islands, network])
def test_the_backward_pass_is_that_of_a_loss_outside_of_autocast(make: Any) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results: list[Any] = []
        for seed in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = model(batch(8, seed))
            loss = out.float().square().mean()
            loss.backward()
            results += [loss.detach(), [p.grad.clone() for p in model.parameters()]]
            optimizer.step()
        return results

    assert both(loop, make, warmup=1).replays == 5
