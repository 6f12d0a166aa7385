"""Train with a full garbage collection after each step, next to a large index of Python objects."""

from __future__ import annotations

import gc
from typing import Any

import torch
from common import Stopwatch, arguments
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH = 128


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(768, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    gc.freeze()  # without it a collection takes 0.2 s, most of it for torch's own objects
    index: list[dict[str, Any]] = [{"id": number, "tags": [number % 7, number % 11]} for number in range(90_000)]
    labels = torch.tensor([entry["id"] % 10 for entry in index[:8192]])
    loader = DataLoader(TensorDataset(torch.randn(8192, 768), labels), batch_size=BATCH, shuffle=True)
    watch = Stopwatch(BATCH)
    while watch.steps < options.steps:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if not options.fixed:
                gc.collect()
            watch.lap()
            if watch.steps == options.steps:
                break
    print(watch.line())


if __name__ == "__main__":
    main()
