"""The strategy that switches Swin models to the fused op; what it computes is tested in tests/kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accel.kernels import support
from accel.kernels.window_hosts import DropIn
from accel.strategies.window_attention import WindowAttention
from tests.kernels.hosts import OfficialWindowAttention


def run_of(model: nn.Module, device: str = "cuda") -> Any:
    return SimpleNamespace(model=model, device=torch.device(device))


def swin() -> nn.Module:
    return nn.Sequential(OfficialWindowAttention(32, (4, 4), 2), nn.Linear(32, 4))


def test_it_needs_a_gpu() -> None:
    assert WindowAttention().refusal(run_of(swin(), "cpu")) == "its kernels need a CUDA device"


def test_it_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "has_triton", lambda: False)
    assert "triton is not installed" in WindowAttention().refusal(run_of(swin()))


def test_it_needs_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "has_triton", lambda: True)
    assert "no window attention" in WindowAttention().refusal(run_of(nn.Linear(2, 2)))
    assert WindowAttention().refusal(run_of(swin())) == ""


def test_it_switches_there_and_back() -> None:
    model, strategy = swin(), WindowAttention()
    x = torch.randn(2, 16, 32)
    plain = model(x)
    for _ in range(2):
        strategy.enable(run_of(model), None)
        assert isinstance(model[0], DropIn)
        torch.testing.assert_close(model(x), plain)
        strategy.disable(run_of(model))
        assert type(model[0]) is OfficialWindowAttention


def test_a_variant_is_refused_with_its_reason() -> None:
    class Variant(OfficialWindowAttention):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return 2 * super().forward(x, mask)

    Variant.__name__ = "WindowAttention"
    with pytest.raises(ValueError, match="0: it computes something else"):
        WindowAttention().enable(run_of(nn.Sequential(Variant(32, (4, 4), 2))), None)
