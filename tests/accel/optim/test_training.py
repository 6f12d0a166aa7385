"""A real small job: handwritten digits, the same curve as torch's optimizers give."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from accel.optim import FusedAdam, FusedAdamW, FusedLAMB, FusedLARS, FusedSGD
from tests.kernels.hosts import need

STEPS, BATCH = 60, 64


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    # Of the package no more than the file: its import takes seconds.
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs scikit-learn, which is not installed")
    file = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    rows = torch.tensor(np.loadtxt(file, delimiter=","), dtype=torch.float32)
    return rows[:, :-1] / 16, rows[:, -1].long()


def curve(digits: tuple[torch.Tensor, torch.Tensor], make: Any) -> torch.Tensor:
    images, labels = digits
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for step in range(STEPS):
        chosen = torch.arange(step * BATCH, (step + 1) * BATCH) % len(images)
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (FusedSGD, torch.optim.SGD, {"lr": 0.3, "momentum": 0.9, "weight_decay": 1e-4}),
        (FusedAdam, torch.optim.Adam, {"lr": 0.01}),
        (FusedAdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    ],
)
def test_the_curve_is_torchs(digits: Any, ours: Any, theirs: Any, options: Any) -> None:
    expected = curve(digits, lambda params: theirs(params, **options))
    torch.testing.assert_close(curve(digits, lambda params: ours(params, **options)), expected, rtol=1e-3, atol=1e-4)
    assert float(expected[-5:].mean()) < 0.6


@pytest.mark.slow
def test_the_curve_is_torchs_by_kernels(digits: Any, interpreted: None) -> None:
    expected = curve(digits, lambda params: torch.optim.AdamW(params, lr=0.01))
    found_losses = curve(digits, lambda params: FusedAdamW(params, lr=0.01))
    torch.testing.assert_close(found_losses, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "options"), [(FusedLAMB, {"lr": 0.05}), (FusedLARS, {"lr": 2.0, "weight_decay": 1e-4})]
)
def test_rates_for_each_layer_learn_too(digits: Any, kind: Any, options: Any) -> None:
    coefficient = {"trust_coefficient": 0.02} if kind is FusedLARS else {}
    losses = curve(digits, lambda params: kind(params, **options, **coefficient))
    assert float(losses[-5:].mean()) < 0.3 * float(losses[0])


@pytest.mark.slow
def test_lamb_and_lars_are_timms() -> None:
    """An independent reading of both papers."""
    need("timm")
    import timm.optim as timm

    for ours, theirs, options in (
        (FusedLAMB, timm.Lamb, {"lr": 0.01, "weight_decay": 0.02}),
        (FusedLARS, timm.Lars, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    ):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape)) for shape in ((5, 3), (7,))]
        others = [nn.Parameter(p.detach().clone()) for p in params]
        extra = {"lr_in_momentum": False} if ours is FusedLARS else {}
        first, second = ours(params, **options, **extra), theirs(others, **options)
        for _ in range(20):
            for a, b in zip(params, others, strict=True):
                a.grad = torch.randn(a.shape)
                b.grad = a.grad.clone()
            first.step()
            second.step()
        for a, b in zip(params, others, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
