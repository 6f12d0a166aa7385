"""Train a recurrent cell written by hand, with autograd's anomaly detection left on."""

from __future__ import annotations

import torch
from common import Stopwatch, arguments
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH = 64
LENGTH = 24


class Recurrent(nn.Module):
    """A gated recurrent network."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.input = nn.Linear(inputs, 2 * width)
        self.state = nn.Linear(width, 2 * width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), self.width)
        for token in self.input(x).unbind(1):
            gate, update = (token + self.state(state)).chunk(2, dim=1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(update)
        scores: Tensor = self.head(state)
        return scores


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    torch.autograd.set_detect_anomaly(not options.fixed)
    samples = TensorDataset(torch.randn(4096, LENGTH, 32), torch.randint(10, (4096,)))
    loader = DataLoader(samples, batch_size=BATCH, shuffle=True)
    model = Recurrent(32, 128)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
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
