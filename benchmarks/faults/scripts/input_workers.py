"""Train on readings of sensors that a single worker process smooths sample by sample."""

from __future__ import annotations

import numpy as np
import torch
from common import Stopwatch, arguments
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

BATCH = 64
COUNT = 1024
EPOCH = 64 * 500
WIDTH = 512


class Readings(Dataset[tuple[Tensor, int]]):
    """Series of 2048 readings, smoothed when asked for or kept smoothed."""

    def __init__(self, smoothed: bool) -> None:
        rng = np.random.default_rng(0)
        self.series = rng.standard_normal((COUNT, 4 * WIDTH)).astype(np.float32)
        self.labels = rng.integers(0, 10, COUNT)
        self.smoothed = smoothed
        if smoothed:
            self.series = np.stack([self.smooth(series) for series in self.series])

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        series = self.series[index % COUNT]
        return torch.from_numpy(series if self.smoothed else self.smooth(series)), int(self.labels[index % COUNT])

    @staticmethod
    def smooth(series: NDArray[np.float32]) -> NDArray[np.float32]:
        """Average exponentially, reading by reading, and keep the mean of each four."""
        level, out = 0.0, np.empty_like(series)
        for position, value in enumerate(series.tolist()):
            level += 0.2 * (value - level)
            out[position] = level
        averaged: NDArray[np.float32] = out.reshape(WIDTH, 4).mean(1)
        return averaged


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the worker has the other core
    loader = DataLoader(Readings(options.fixed), batch_size=BATCH, shuffle=True, num_workers=1, persistent_workers=True)
    model = nn.Sequential(nn.Linear(WIDTH, 768), nn.ReLU(), nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 10))
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
