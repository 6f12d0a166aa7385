"""The demo's training script: what anyone would write, plus the one line."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from benchmarks.loading.data import load
from benchmarks.losses import Losses
from benchmarks.pairs import Turn


def network(classes: int, width: int = 32) -> nn.Module:
    """A small convolutional network for 28 x 28 grey images."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 49, classes),
    )


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader[Any]) -> float:
    """Return the share of right answers on a test set, in percent."""
    model.eval()
    right = torch.tensor(0)
    for images, labels in loader:
        right += (model(images).argmax(1) == labels).sum()
    model.train()
    count: int = len(loader.dataset)  # type: ignore[arg-type]
    return 100.0 * int(right) / count


def train(
    seed: int,
    accelerate: dict[str, Any] | None,
    on_step: Turn,
    folder: str | None = None,
    batch_size: int = 64,
    epochs: int = 1,
) -> dict[str, Any]:
    """Train until epochs or turns are over, plainly or with `accel.optimize(…, **accelerate)`, and tell the outcome."""
    torch.manual_seed(seed)
    data = load(folder)
    model = network(data.classes)
    loader = DataLoader(data.train, batch_size=batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=epochs * len(loader))
    report: Callable[[], Any] = lambda: None  # noqa: E731

    if accelerate is not None:
        import accel

        model, loader, optimizer = accel.optimize(model, loader, optimizer, cache=False, **accelerate)
        report = lambda: accel.explain(model).state  # noqa: E731

    losses = Losses(torch.device("cpu"))
    for _ in range(epochs):
        for images, labels in loader:
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.add(loss)
            on_step(len(losses), report)
            if on_step.is_over():
                break
        if on_step.is_over():
            break

    outcome: dict[str, Any] = {"accuracy": math.nan, "losses": losses.numbers()}
    if not on_step.is_over():
        outcome["accuracy"] = accuracy(model, DataLoader(data.test, batch_size=1000))
    if accelerate is not None:
        outcome["report"] = accel.explain(model).to_json()
    return outcome
