"""Train a deep network of tiny layers on tiny batches."""

from __future__ import annotations

import torch
from common import Stopwatch, arguments
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.layer(self.norm(x)))


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    batch = 64 if options.fixed else 8
    samples = TensorDataset(torch.randn(16_384, 32), torch.randint(10, (16_384,)))
    loader = DataLoader(samples, batch_size=batch, shuffle=True)
    model = nn.Sequential(*[Block(32) for _ in range(80)], nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    watch = Stopwatch(batch)
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
