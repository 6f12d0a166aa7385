"""Train large matrix products on a GPU that is busy all the time; a loss read in each step costs nothing then."""

from __future__ import annotations

import torch
from common import Stopwatch, arguments
from torch import nn
from torch.nn import functional as F

BATCH, WIDTH, LAYERS = 4096, 4096, 6


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    x, y = torch.randn(BATCH, WIDTH, device="cuda"), torch.randint(WIDTH, (BATCH,), device="cuda")
    watch = Stopwatch(BATCH)
    total = 0.0
    while watch.steps < options.steps:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
        watch.lap()
    torch.cuda.synchronize()
    watch.stop()
    print(watch.line())


if __name__ == "__main__":
    main()
