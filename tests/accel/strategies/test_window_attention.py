"""The strategy that switches Swin models to the fused op; what it computes is tested in tests/kernels."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import strategies
from accel.kernels import support
from accel.kernels.dropins import DropIn
from accel.strategies.window_attention import WindowAttention
from tests.kernels.hosts import MODELS, OfficialWindowAttention, serve_cpu


@pytest.fixture(autouse=True)
def _serves_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_cpu(monkeypatch)


def run_of(model: nn.Module, device: str = "cuda") -> Any:
    return SimpleNamespace(model=model, device=torch.device(device))


def swin() -> nn.Module:
    return nn.Sequential(OfficialWindowAttention(32, (4, 4), 2), nn.Linear(32, 4))


def test_it_needs_a_gpu() -> None:
    assert WindowAttention().refusal(run_of(swin(), "cpu")).startswith("its kernels need a CUDA device; on a CPU")


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


def searched(model: nn.Module, inputs: Tensor, device: str, epochs: int) -> dict[str, Any]:
    """Train a classifier of 4 under a search that tries this strategy alone, and return the report."""
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(inputs, torch.randint(4, (len(inputs),)))
    keys, others = list(model.state_dict()), tuple(name for name in strategies.names() if name != "window_attention")
    model, loader, optimizer = accel.optimize(
        model, DataLoader(data, batch_size=16), optimizer, budget=60, enable=("window_attention",), disable=others
    )
    for _ in range(epochs):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert torch.isfinite(loss)
        if accel.explain(model).state != "searching":
            break
    report: dict[str, Any] = json.loads(accel.explain(model).to_json())
    accel.undo(model)
    assert list(model.state_dict()) == keys
    assert not any(isinstance(module, DropIn) for module in model.modules())
    return report


def tried(report: dict[str, Any]) -> bool:
    """Tell whether the search timed the strategy on real steps, and found nothing wrong with it."""
    row = next(one for one in report["rows"] if one["name"] == "window_attention")
    wrong = [word for word in ("Error", "differ", "failed") if word in row["why"]]
    assert row["status"] in ("kept", "undone", "inconclusive") and not wrong, row
    return row["steps"] > 0 and row["after_ms"] is not None and row["gradient_error"] is not None


def test_a_search_tries_it_on_a_swin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowAttention, "refusal", lambda self, run: "")
    model = nn.Sequential(OfficialWindowAttention(32, (4, 4), 2), nn.Flatten(), nn.Linear(512, 4))
    assert tried(searched(model, torch.randn(64, 16, 32), "cpu", 2000))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of libraries
def test_on_a_gpu_a_search_tries_it_on_a_swin() -> None:
    assert tried(searched(MODELS["timm v1"](64, 4), torch.randn(64, 3, 64, 64), "cuda", 500))
