"""A healthy control: wide layers, data in memory."""

from __future__ import annotations

import torch
from common import Stopwatch, arguments
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH = 128


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(8192, 1024), torch.randint(10, (8192,)))
    loader = DataLoader(samples, batch_size=BATCH, shuffle=True)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    watch = Stopwatch(BATCH)
    while watch.steps < options.steps:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            watch.lap()
            if watch.steps == options.steps:
                break
    print(watch.line())


if __name__ == "__main__":
    main()
