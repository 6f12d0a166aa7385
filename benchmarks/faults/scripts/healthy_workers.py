"""A healthy control: two workers whose work hides behind the step."""

from __future__ import annotations

import torch
from common import Stopwatch, arguments
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

BATCH = 192
EPOCH = BATCH * 500
QUARTILES = torch.tensor([0.25, 0.5, 0.75])


class Scaled(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are scaled when asked for."""

    def __init__(self) -> None:
        self.x = torch.randn(2048, 768)
        self.y = torch.randint(10, (2048,))

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index % 2048]
        low, middle, high = torch.quantile(x, QUARTILES)
        return (x - middle) / (high - low), self.y[index % 2048]


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the workers share the other core
    loader = DataLoader(Scaled(), batch_size=BATCH, shuffle=True, num_workers=2, persistent_workers=True)
    model = nn.Sequential(nn.Linear(768, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
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
