"""The job of `benchmarks.tuning`: a small CNN on scikit-learn's digits, whose held-out loss is to be low.

python -m benchmarks.tuning_job [--accel] --lr=0.05 --width=16 --decay=0.001
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import click
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.elastic.sample_position import remaining_epochs

EPOCHS = 24
_HELD_OUT = 500
LOG = "TUNING_LOG"
"""Variable with the file that each score is written to, with its time."""


def data() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """Return what is trained on, and images and labels that are held out."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return TensorDataset(x[_HELD_OUT:], y[_HELD_OUT:]), x[:_HELD_OUT], y[:_HELD_OUT]


def train(lr: float, width: int, decay: float, report: Callable[[float, int], None], *, with_accel: bool) -> float:
    """Train, report the loss of what is held out after each epoch, and return the last one."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    samples, x, y = data()
    model: Any = nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * width, 10)),
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=decay)
    loader: Any = DataLoader(samples, 16, shuffle=True)
    if with_accel:
        folder = os.environ["ACCEL_CHECKPOINT"]
        model, loader, optimizer = accel.optimize(
            model, loader, optimizer, elastic=accel.Elastic(max_batch_size=128, checkpoint=folder), cache=False
        )
    loss = float("nan")
    for epoch in remaining_epochs(loader, EPOCHS) if with_accel else range(EPOCHS):
        model.train()
        for image, label in loader:
            optimizer.zero_grad()
            cross_entropy(model(image), label).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = float(cross_entropy(model(x), y))
        with open(os.environ[LOG], "a", encoding="utf-8") as file:
            file.write(json.dumps({"at": time.time(), "loss": loss}) + "\n")
        report(loss, epoch)
    return loss


@click.command()
@click.option("--accel", "with_accel", is_flag=True)
@click.option("--lr", type=float, required=True)
@click.option("--width", type=int, required=True)
@click.option("--decay", type=float, required=True)
def main(with_accel: bool, lr: float, width: int, decay: float) -> None:
    """Train with these parameters."""
    train(lr, width, decay, accel.report_score, with_accel=with_accel)


if __name__ == "__main__":
    main()
