"""Train on a GPU and read a value back from each layer in every step: the queue runs dry each time."""

from __future__ import annotations

import torch
from common import Stopwatch, arguments
from torch import nn
from torch.nn import functional as F

BATCH, WIDTH, LAYERS = 512, 2048, 24
"""Without the reads a layer takes the device as long as the host, or longer: with 64 rows of 1024, launches alone held
the loop back on an H200, and reads cost less than these."""
EVERY = 100


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)).cuda()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-4, fused=True)
    x, y = torch.randn(BATCH, WIDTH, device="cuda"), torch.randint(WIDTH, (BATCH,), device="cuda")
    watch = Stopwatch(BATCH)
    norms = []
    while watch.steps < options.steps:
        look = not options.fixed or watch.steps % EVERY == 0
        hidden = x
        for layer in layers:
            hidden = F.relu(layer(hidden))
            if look:
                norms.append(hidden.norm().item())
        optimizer.zero_grad()
        F.cross_entropy(hidden, y).backward()
        optimizer.step()
        watch.lap()
    torch.cuda.synchronize()
    watch.stop()
    print(watch.line())


if __name__ == "__main__":
    main()
