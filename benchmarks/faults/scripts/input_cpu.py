"""Classify small pictures that are prepared one by one in the training process."""

from __future__ import annotations

import numpy as np
import torch
from common import Stopwatch, arguments
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

BATCH = 64
COUNT = 4096


def prepare(pixels: NDArray[np.uint8]) -> Tensor:
    """Equalise the histogram, blur and normalise."""
    counts = np.bincount(pixels.ravel(), minlength=256)
    image = (counts.cumsum() / pixels.size)[pixels]
    for axis in (0, 1, 0, 1, 0, 1):
        image = (np.roll(image, 1, axis) + 2 * image + np.roll(image, -1, axis)) / 4
    image = (image - image.mean()) / image.std()
    return torch.from_numpy(image.astype(np.float32))


class Pictures(Dataset[tuple[Tensor, int]]):
    """Grey pictures of 32x32 pixels in ten classes."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.pixels = rng.integers(0, 256, (COUNT, 32, 32), dtype=np.uint8)
        self.labels = rng.integers(0, 10, COUNT)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return prepare(self.pixels[index]), int(self.labels[index])


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    pictures: Dataset[tuple[Tensor, ...]] | Pictures = Pictures()
    if options.fixed:
        raw = Pictures()
        pictures = TensorDataset(torch.stack([prepare(p) for p in raw.pixels]), torch.from_numpy(raw.labels))
    loader = DataLoader(pictures, batch_size=BATCH, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU())
    model.append(nn.Linear(512, 10))
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
