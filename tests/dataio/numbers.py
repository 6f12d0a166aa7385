"""What the tests of the loader share: a dataset whose samples tell their index, and every way to make batches."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

ENGINES = [("inline", 1), ("threads", 2), ("fork", 1), ("fork", 2), ("auto", 2)]


class Numbers(Dataset[Tensor]):
    """Sample i is (i, epoch of the dataset, a random number)."""

    def __init__(self, length: int = 50) -> None:
        self.length, self.epoch = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), float(self.epoch), float(torch.rand(1)) if self.length == 51 else 0.0])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def seeded(number: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def indices(batch: Tensor) -> list[int]:
    return [int(value) for value in batch[:, 0].tolist()]


def run(loader: Any, epochs: int, *, stop: int | None = None, set_epoch: Any = None) -> list[list[Tensor]]:
    seen = []
    for epoch in range(epochs):
        if set_epoch is not None:
            set_epoch(epoch)
        batches = []
        for count, batch in enumerate(loader):
            if count == stop:
                break
            batches.append(batch.clone())
        seen.append(batches)
    return seen


def same(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    return [len(e) for e in one] == [len(e) for e in other] and all(
        torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


def saved_and_loaded(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
