"""Train a recommender with one small parameter per user and an AdamW that updates them one by one."""

from __future__ import annotations

import torch
from common import Stopwatch, arguments
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH = 64
USERS, WIDTH = 400, 64


class Recommender(nn.Module):
    """Adds a user's own vector to an item's features, then classifies."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.ParameterList([torch.randn(WIDTH) for _ in range(USERS)])
        self.layers = nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
        self.head = nn.Linear(256, 10)

    def forward(self, features: Tensor, user: Tensor) -> Tensor:
        vectors = torch.stack(list(self.users))
        scores: Tensor = self.head(self.layers(features + vectors[user]))
        return scores


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(4096, WIDTH), torch.randint(USERS, (4096,)), torch.randint(10, (4096,)))
    loader = DataLoader(samples, batch_size=BATCH, shuffle=True)
    model = Recommender()
    if options.fixed:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    watch = Stopwatch(BATCH)
    while watch.steps < options.steps:
        for features, user, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(features, user), y)
            loss.backward()
            optimizer.step()
            watch.lap()
            if watch.steps == options.steps:
                break
    print(watch.line())


if __name__ == "__main__":
    main()
