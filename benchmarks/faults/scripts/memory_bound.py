"""Train a wide layer with an activation function written out operation by operation."""

from __future__ import annotations

import math

import torch
from common import Stopwatch, arguments
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH = 64


class WrittenOutGelu(nn.Module):
    """GELU by its formula."""

    def forward(self, x: Tensor) -> Tensor:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1 + torch.tanh(inner))


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(4096, 16), torch.randint(10, (4096,)))
    loader = DataLoader(samples, batch_size=BATCH, shuffle=True)
    activation = nn.GELU(approximate="tanh") if options.fixed else WrittenOutGelu()
    model = nn.Sequential(nn.Linear(16, 20_480), activation, nn.Linear(20_480, 10))
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
