"""Train on a small data set whose workers are started anew for each short epoch."""

from __future__ import annotations

import torch
from common import Stopwatch, arguments
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH = 32


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(10 * BATCH, 512), torch.randint(10, (10 * BATCH,)))
    loader = DataLoader(samples, batch_size=BATCH, shuffle=True, num_workers=2, persistent_workers=options.fixed)
    model = nn.Sequential(nn.Linear(512, 1536), nn.ReLU(), nn.Linear(1536, 1024), nn.ReLU(), nn.Linear(1024, 10))
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
