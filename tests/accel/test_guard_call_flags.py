"""Replays are made with the flags of the call: a loop may freeze parameters, or evaluate, before the step ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.guard import guard
from accel.guard.guard import Comparison
from tests.accel.guard_replays import replayed_both_ways
from tests.accel.loops import Longer

CPU = torch.device("cpu")


def checked(model: nn.Module, at_boundary: Callable[[], object], wrap: Callable[[Any], Any]) -> Comparison:
    """Record a call, change flags, and compare the plain call with a wrapped one."""
    torch.manual_seed(0)
    recording = guard.record(model, CPU, (torch.randn(8, 3),), {})
    outputs = model(*recording.args)
    recording.listen(outputs)
    outputs.square().mean().backward()
    at_boundary()
    return replayed_both_ways(model, wrap, recording)


def longer(call: Any) -> Any:
    """Return a call whose gradients are a twentieth too long."""
    return lambda x: Longer.apply(call(x))


def test_gradients_of_a_model_that_is_frozen_after_its_call_are_compared() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    finding = checked(model, lambda: model.requires_grad_(False), longer)
    assert "off by 5.0e-02" in finding.problem
    assert not any(p.requires_grad for p in model.parameters())


def test_parameters_that_are_thawed_after_the_call_have_no_gradient_to_compare() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    recording = guard.record(model, CPU, (torch.randn(8, 3),), {})
    model.requires_grad_(True)
    assert guard.replay(model, model, recording).names == ["2.weight", "2.bias"]
    assert all(p.requires_grad for p in model.parameters())


def test_the_training_path_is_compared_though_the_step_ends_in_evaluation_mode() -> None:
    class Wrong(nn.Module):
        def __init__(self, call: nn.Module) -> None:
            super().__init__()
            self.call = call

        def forward(self, x: Tensor) -> Any:
            return self.call(x) * (1.5 if self.call.training else 1.0)

    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    assert "output is off" in checked(model, model.eval, Wrong).problem
    assert not any(module.training for module in model.modules())


def test_flags_are_put_back_when_a_call_fails() -> None:
    model = nn.Linear(3, 1)
    recording = guard.record(model, CPU, (torch.randn(8, 3),), {})
    model.eval().requires_grad_(False)

    def failing(x: Tensor) -> Tensor:
        assert model.training and model.weight.requires_grad
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        guard.replay(model, failing, recording)
    assert not model.training
    assert not model.weight.requires_grad
