"""Classify pictures that the loop shifts, mirrors and masks one by one before the forward pass."""

from __future__ import annotations

import random

import torch
from common import Stopwatch, arguments
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH = 128
SIDE = 28
HOLE, HOLES = 4, 8


def augment_one_by_one(images: Tensor) -> Tensor:
    """Shift, mirror and mask each picture at random."""
    augmented = []
    for image in images:
        shifted = torch.roll(image, (random.randint(-2, 2), random.randint(-2, 2)), (0, 1))
        if random.random() < 0.5:
            shifted = shifted.flip(1)
        mask = torch.ones_like(shifted)
        for _ in range(HOLES):
            top, left = random.randrange(SIDE - HOLE), random.randrange(SIDE - HOLE)
            mask[top : top + HOLE, left : left + HOLE] = 0
        augmented.append((shifted * mask - shifted.mean()) / shifted.std())
    return torch.stack(augmented)


def augment_at_once(images: Tensor) -> Tensor:
    """Do the same to the whole batch."""
    count = len(images)
    line = torch.arange(SIDE)
    rows = (line + torch.randint(-2, 3, (count, 1))) % SIDE
    columns = (line + torch.randint(-2, 3, (count, 1))) % SIDE
    columns = torch.where(torch.rand(count, 1) < 0.5, columns.flip(1), columns)
    shifted = images[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
    top, left = torch.randint(SIDE - HOLE, (2, count, HOLES, 1))
    inside_rows, inside_columns = ((line >= start) & (line < start + HOLE) for start in (top, left))
    hole = (inside_rows[:, :, :, None] & inside_columns[:, :, None, :]).any(1)
    mean, std = shifted.mean((1, 2), keepdim=True), shifted.std((1, 2), keepdim=True)
    return (shifted.masked_fill(hole, 0) - mean) / std


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    random.seed(0)
    images = torch.randn(4096, SIDE, SIDE)
    samples = TensorDataset(augment_at_once(images) if options.fixed else images, torch.randint(10, (4096,)))
    loader = DataLoader(samples, batch_size=BATCH, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 640), nn.ReLU(), nn.Linear(640, 512), nn.ReLU())
    model.append(nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    watch = Stopwatch(BATCH)
    while watch.steps < options.steps:
        for x, y in loader:
            augmented = x if options.fixed else augment_one_by_one(x)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(augmented), y)
            loss.backward()
            optimizer.step()
            watch.lap()
            if watch.steps == options.steps:
                break
    print(watch.line())


if __name__ == "__main__":
    main()
