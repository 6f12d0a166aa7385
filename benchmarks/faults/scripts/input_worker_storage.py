"""Train on samples that two worker processes read from slow storage."""

from __future__ import annotations

import time

import torch
from common import Stopwatch, arguments
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

BATCH = 32
EPOCH = BATCH * 500
LATENCY = 0.0018
"""Of one read, s."""


class Remote(Dataset[tuple[Tensor, Tensor]]):
    """Samples behind a network file system, or held in memory."""

    def __init__(self, latency: float) -> None:
        self.x = torch.randn(4096, 512)
        self.y = torch.randint(10, (4096,))
        self.latency = latency

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.latency:
            time.sleep(self.latency)  # the round trip of a read
        return self.x[index % 4096], self.y[index % 4096]


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    samples = Remote(0.0 if options.fixed else LATENCY)
    loader = DataLoader(samples, batch_size=BATCH, shuffle=True, num_workers=2, persistent_workers=True)
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
