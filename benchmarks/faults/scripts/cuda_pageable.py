"""Train on a GPU with large batches copied from pageable memory, each while the model waits."""

from __future__ import annotations

from typing import Any

import torch
from common import Stopwatch, arguments
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

BATCH, SIDE = 256, 160


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    # The same few batches again and again: nothing but the copy is slow.
    batches = [(torch.randn(BATCH, 3, SIDE, SIDE), torch.randint(10, (BATCH,))) for _ in range(4)] * 16
    if options.fixed:
        batches = [(x.pin_memory(), y.pin_memory()) for x, y in batches[:4]] * 16
    loader: DataLoader[Any] = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    watch = Stopwatch(BATCH)
    while watch.steps < options.steps:
        for x, y in loader:
            x, y = x.cuda(non_blocking=options.fixed), y.cuda(non_blocking=options.fixed)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            watch.lap()
            if watch.steps == options.steps:
                break
    torch.cuda.synchronize()
    watch.stop()
    print(watch.line())


if __name__ == "__main__":
    main()
