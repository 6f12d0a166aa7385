"""Train and write the quantiles of every weight to a log after each step."""

from __future__ import annotations

import tempfile
from typing import TextIO

import torch
from common import Stopwatch, arguments
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH = 64


def write_log(log: TextIO, step: int, model: nn.Module) -> None:
    """Write one line per parameter."""
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()[:40_000]
        quantiles = torch.quantile(values, torch.tensor([0.01, 0.25, 0.5, 0.75, 0.99]))
        words = " ".join(f"{value:.6f}" for value in quantiles.tolist())
        log.write(f"{step} {name} norm {values.norm().item():.6f} quantiles {words}\n")
    log.flush()


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(4096, 512), torch.randint(10, (4096,)))
    loader = DataLoader(samples, batch_size=BATCH, shuffle=True)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 768), nn.ReLU(), nn.Linear(768, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    watch = Stopwatch(BATCH)
    every = 100 if options.fixed else 1
    with tempfile.TemporaryFile("w") as log:
        while watch.steps < options.steps:
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                if (watch.steps + 1) % every == 0:
                    write_log(log, watch.steps, model)
                watch.lap()
                if watch.steps == options.steps:
                    break
    print(watch.line())


if __name__ == "__main__":
    main()
