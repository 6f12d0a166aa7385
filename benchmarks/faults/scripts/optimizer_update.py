"""Train word vectors with an Adam written by hand, one tensor operation after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from common import Stopwatch, arguments
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH = 192
WORDS = 16_000


class PlainAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay, as in the paper."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-3, decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update every parameter."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["t"] = 0
                    state["m"] = torch.zeros_like(parameter)
                    state["v"] = torch.zeros_like(parameter)
                state["t"] += 1
                gradient = parameter.grad
                state["m"] = 0.9 * state["m"] + 0.1 * gradient
                state["v"] = 0.999 * state["v"] + 0.001 * gradient**2
                mean = state["m"] / (1 - 0.9 ** state["t"])
                variance = state["v"] / (1 - 0.999 ** state["t"])
                update = mean / (variance**0.5 + 1e-8) + group["decay"] * parameter
                parameter.copy_(parameter - group["lr"] * update)
        return None if closure is None else closure()


class Reader(nn.Module):
    """Averages word vectors, then classifies."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 128)
        self.layers = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 10))

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.layers(self.words(words).mean(1))
        return scores


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    samples = TensorDataset(torch.randint(WORDS, (4096, 8)), torch.randint(10, (4096,)))
    loader = DataLoader(samples, batch_size=BATCH, shuffle=True)
    model = Reader()
    optimizer: torch.optim.Optimizer
    if options.fixed:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    else:
        optimizer = PlainAdam(model.parameters())
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
