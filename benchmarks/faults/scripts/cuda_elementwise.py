"""Train with a hand-written activation of many passes over large tensors on a GPU: memory bandwidth is the limit."""

from __future__ import annotations

import math

import torch
from common import Stopwatch, arguments
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, WIDTH = 65536, 512


def gelu(x: Tensor) -> Tensor:
    """In eight passes what one would do."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    first, last = nn.Linear(64, WIDTH).cuda(), nn.Linear(WIDTH, 10).cuda()
    parameters = [*first.parameters(), *last.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01, fused=True)
    x, y = torch.randn(BATCH, 64, device="cuda"), torch.randint(10, (BATCH,), device="cuda")
    watch = Stopwatch(BATCH)
    while watch.steps < options.steps:
        hidden = first(x)
        hidden = F.gelu(hidden, approximate="tanh") if options.fixed else gelu(hidden)
        optimizer.zero_grad()
        F.cross_entropy(last(hidden), y).backward()
        optimizer.step()
        watch.lap()
    torch.cuda.synchronize()
    watch.stop()
    print(watch.line())


if __name__ == "__main__":
    main()
