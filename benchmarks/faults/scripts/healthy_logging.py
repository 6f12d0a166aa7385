"""A healthy control: reads the loss of every step and logs its mean every 50."""

from __future__ import annotations

import logging

import torch
from common import Stopwatch, arguments
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH = 128


def main() -> None:
    options = arguments(__doc__)
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(8192, 768), torch.randint(10, (8192,)))
    loader = DataLoader(samples, batch_size=BATCH, shuffle=True)
    model = nn.Sequential(nn.Linear(768, 1280), nn.ReLU(), nn.Linear(1280, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    watch = Stopwatch(BATCH)
    total = 0.0
    while watch.steps < options.steps:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
            if (watch.steps + 1) % 50 == 0:
                logging.info("step %d: mean loss %.4f", watch.steps + 1, total / 50)
                total = 0.0
            watch.lap()
            if watch.steps == options.steps:
                break
    print(watch.line())


if __name__ == "__main__":
    main()
