"""At S times the batch, as much progress brings the loss as far down, in fewer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.elastic.learning_rate import LearningRateScaler
from accel.elastic.scaling_rules import AdaScale, BatchScale, Sqrt
from accel.optim import FusedAdamW

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def rosenbrock(xy: Tensor) -> Tensor:
    return (1 - xy[0]) ** 2 + 10 * (xy[1] - xy[0] ** 2) ** 2


@pytest.mark.parametrize(
    ("make", "rule", "scale", "least_gain"),
    [
        (lambda p: torch.optim.SGD(p, 0.004), AdaScale(), 8, 1.5),
        (lambda p: torch.optim.SGD(p, 0.004, momentum=0.5), AdaScale(), 4, 1.2),
        (lambda p: torch.optim.Adam(p, 0.02), Sqrt(), 8, 1.5),
        (lambda p: FusedAdamW(p, 0.02, weight_decay=0.0), Sqrt(), 4, 1.2),
    ],
)
def test_noisy_rosenbrock_converges_as_at_the_base_batch(make: Make, rule: Any, scale: int, least_gain: float) -> None:
    """As much progress at S as at 1 brings the loss as far down, in fewer steps."""
    ends = []
    for times in (1, scale):
        draw = torch.Generator().manual_seed(3)
        xy = nn.Parameter(torch.tensor([-0.5, 1.0]))
        optimizer = make([xy])
        scaler = LearningRateScaler(optimizer, rule)
        while scaler.progress < 600:
            optimizer.zero_grad()
            rosenbrock(xy).backward()  # type: ignore[no-untyped-call]
            assert xy.grad is not None
            squared = float(xy.grad.square().sum())
            variance = 2 * 1.0**2  # tr Σ / M0: each of two entries gets noise of deviation 1 / √S
            xy.grad += torch.randn(2, generator=draw) / math.sqrt(times)
            scaler.update(BatchScale(64 * times, 64, noise=64 * variance / max(squared, 1e-12)))
            optimizer.step()
        ends.append((float(rosenbrock(xy.detach())), scaler.steps))
    (base, base_steps), (large, steps) = ends
    assert base_steps == 600
    assert steps < 600 / least_gain
    assert base < 0.5 and large < 0.5  # from 4.1 at the start
