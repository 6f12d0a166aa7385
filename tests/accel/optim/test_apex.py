"""apex as a backend, by a stand-in for it: what it is given, and what is said where it is missing."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from accel.errors import InvalidArgument
from accel.optim import FusedAdam, FusedAdamW, FusedLAMB, apex


class _ApexAdam(torch.optim.Optimizer):
    """Counts by group, and keeps two moments, as apex does."""

    def __init__(self, params: Any, lr: float, **options: Any) -> None:
        super().__init__(params, {"lr": lr})
        self.options = options

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["bias_correction"]
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                with torch.no_grad():
                    p.sub_(group["lr"])


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    package, optimizers = ModuleType("apex"), ModuleType("apex.optimizers")
    optimizers.FusedAdam = optimizers.FusedLAMB = _ApexAdam  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", package)
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    # The stand-in runs on a CPU.
    monkeypatch.setattr(apex.ApexStep, "_check", lambda self: None)
    return optimizers


def test_it_is_missing() -> None:
    with pytest.raises(InvalidArgument, match="needs NVIDIA's apex, which is not installed"):
        FusedAdam([torch.zeros(1)], backend="apex")


def test_another_project_has_its_name(installed: ModuleType) -> None:
    del installed.FusedAdam  # type: ignore[attr-defined]
    with pytest.raises(InvalidArgument, match=r"needs apex.optimizers.FusedAdam. Found: .*unusable \(AttributeError"):
        FusedAdam([torch.zeros(1)], backend="apex")


def test_it_steps_on_our_groups_and_our_state(installed: ModuleType) -> None:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = FusedAdamW([param], lr=0.25, backend="apex")
    assert optimizer._apex is not None
    assert optimizer._apex._inner.options == {"adam_w_mode": True}
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5  # a scheduler
    optimizer.step()
    assert torch.equal(param.detach(), torch.full((2,), 0.25))
    state = optimizer.state_dict()
    assert float(state["state"][0]["step"]) == 2
    ours = FusedAdamW([param])
    ours.load_state_dict(state)
    assert float(ours.state[param]["step"]) == 2
    again = FusedAdamW([param], backend="apex")
    again.load_state_dict(ours.state_dict())
    again.step()
    assert again.param_groups[0]["step"] == 3


def test_options_of_lamb_are_passed_on(installed: ModuleType) -> None:
    optimizer = FusedLAMB([torch.zeros(1)], backend="apex", max_grad_norm=2.0)
    assert optimizer._apex is not None
    assert optimizer._apex._inner.options == {"adam_w_mode": True, "max_grad_norm": 2.0, "use_nvlamb": False}


@pytest.mark.parametrize(
    ("options", "words"),
    [({"amsgrad": True}, "apex has no amsgrad"), ({"max_grad_norm": 1.0}, "no clipping"), ({}, "on a GPU. Found")],
)
def test_what_it_has_no_kernels_for(options: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apex, "symbol", lambda name: _ApexAdam)
    with pytest.raises(InvalidArgument, match=words):
        FusedAdam([torch.zeros(1)], backend="apex", **options)


def test_scalers_skip_its_steps_themselves(installed: ModuleType) -> None:
    assert not FusedAdam([torch.zeros(1)], backend="apex")._step_supports_amp_scaling
    assert FusedAdam([torch.zeros(1)])._step_supports_amp_scaling
