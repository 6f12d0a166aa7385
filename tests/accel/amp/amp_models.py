"""Small models, and the loop of mixed precision written out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel import optim

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9),
    "SGD without momentum": lambda params: torch.optim.SGD(params, 0.05),
    "Adam": lambda params: torch.optim.Adam(params, 0.01),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, 0.01, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, 0.01, fused=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, 0.01),
    "Adagrad": lambda params: torch.optim.Adagrad(params, 0.01),
    "FusedSGD": lambda params: optim.FusedSGD(params, 0.05, momentum=0.9),
    "FusedAdamW": lambda params: optim.FusedAdamW(params, 0.01),
    "FusedLAMB": lambda params: optim.FusedLAMB(params, 0.01),
}


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def cnn(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def batches(count: int, *shape: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(6, *shape, generator=generator), torch.randint(0, 4, (6,), generator=generator))
        for _ in range(count)
    ]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Take a step for each batch, and return copies of the weights."""
    for x, target in data:
        optimizer.zero_grad()
        loss_of(model(x), target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]
