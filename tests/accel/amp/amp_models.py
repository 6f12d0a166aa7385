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


def by_hand(
    model: nn.Module,
    make: Callable[[Any], torch.optim.Optimizer],
    data: Sequence[tuple[Tensor, Tensor]],
    dtype: torch.dtype,
    scale: float,
    clip: float | None = None,
) -> list[Tensor]:
    """Train with float32 master weights that an ordinary optimizer updates; return them."""
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = make(masters)
    model.to(dtype)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    for x, target in data:
        for p in model.parameters():
            p.grad = None
        (loss_of(model(x.to(dtype)).float(), target) * scale).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            assert p.grad is not None
            master.grad = p.grad.float() * (1.0 / scale)
        if clip is not None:
            nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
    return [master.detach() for master in masters]
