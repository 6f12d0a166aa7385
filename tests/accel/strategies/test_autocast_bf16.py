"""What autocast keeps of the weights does not outlive an update."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accel import amp
from accel.run.gate import Gate
from accel.strategies.autocast_bf16 import AutocastBf16


def by_strategy(model: nn.Module) -> None:
    run: Any = SimpleNamespace(model=model, device=torch.device("cpu"), gate=Gate(model, ["autocast_bf16"]))
    AutocastBf16().enable(run, None)


def by_amp(model: nn.Module) -> None:
    amp.decorate(model, torch.optim.SGD(model.parameters(), 0.1), level="O1", dtype=torch.bfloat16)


@pytest.mark.parametrize("put_on", [by_strategy, by_amp])
@pytest.mark.parametrize("fails", [False, True])
def test_within_autocast_that_is_off_a_call_sees_the_new_weights(
    put_on: Callable[[nn.Module], None], fails: bool
) -> None:
    """Torch keeps its casts of weights until the outermost region of autocast ends: for an epoch, say."""

    class Linear(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outputs = super().forward(x)
            if fails and self.weight.any():
                raise ValueError("mine")
            return outputs

    model = Linear(2, 2, bias=False)
    put_on(model)
    with torch.autocast("cpu", enabled=False):
        try:
            model(torch.ones(1, 2))
        except ValueError:
            assert fails
        with torch.no_grad():
            model.weight.zero_()
        assert model(torch.ones(1, 2)).tolist() == [[0.0, 0.0]]
