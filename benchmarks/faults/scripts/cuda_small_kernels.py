"""Train a narrow and deep network on a GPU: launching a kernel takes longer than running it."""

from __future__ import annotations

import torch
from common import Stopwatch, arguments
from torch import nn
from torch.nn import functional as F

BATCH, WIDTH, LAYERS = 32, 64, 60


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    batch = BATCH * 8 if options.fixed else BATCH
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x, y = torch.randn(batch, WIDTH, device="cuda"), torch.randint(WIDTH, (batch,), device="cuda")
    watch = Stopwatch(batch)
    while watch.steps < options.steps:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        watch.lap()
    torch.cuda.synchronize()
    watch.stop()
    print(watch.line())


if __name__ == "__main__":
    main()
