"""Train and evaluate on the whole validation set every 20 steps."""

from __future__ import annotations

from typing import Any

import torch
from common import Stopwatch, arguments
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH = 64


def evaluate(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    """Return the share of samples that are classified rightly."""
    model.eval()
    right = total = 0
    with torch.no_grad():
        for x, y in loader:
            right += int((model(x).argmax(1) == y).sum().item())
            total += len(y)
    model.train()
    return right / total


def make_set(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 512), torch.randint(10, (count,)))


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    loader: DataLoader[Any] = DataLoader(make_set(4096), batch_size=BATCH, shuffle=True)
    validation: DataLoader[Any] = DataLoader(make_set(6400), batch_size=BATCH)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 768), nn.ReLU(), nn.Dropout(0.1))
    model.append(nn.Linear(768, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    watch = Stopwatch(BATCH)
    every = 10_000 if options.fixed else 20
    best = 0.0
    while watch.steps < options.steps:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if (watch.steps + 1) % every == 0:
                best = max(best, evaluate(model, validation))
            watch.lap()
            if watch.steps == options.steps:
                break
    print(watch.line())


if __name__ == "__main__":
    main()
