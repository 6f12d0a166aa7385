"""The data of the loops, made from a generator of its own with a fixed seed.

Every run has the same data, and making it draws nothing from torch's global generator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


class Labelled(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and their labels."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x = x
        self.y = y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Augmented(Labelled):
    """Images, flipped at random and shifted by up to two pixels: draws from torch's global generator."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = super().__getitem__(index)
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        dy, dx = torch.randint(-2, 3, (2,)).tolist()
        return image.roll((dy, dx), dims=(-2, -1)), label


class Normalised(Labelled):
    """Inputs brought to mean 0 and deviation 1 one by one, so that an item costs something to load."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return (x - x.mean()) / (x.std() + 1e-6), y


class Sentences(Dataset[dict[str, Any]]):
    """Token lists of uneven length with a label, as dictionaries."""

    def __init__(self, count: int, words: int = 200, classes: int = 4) -> None:
        g = _generator()
        self.labels = torch.randint(classes, (count,), generator=g).tolist()
        self.lengths = torch.randint(8, 33, (count,), generator=g).tolist()
        topic = torch.rand(classes, words, generator=g) ** 4
        self.ids = torch.multinomial(topic[torch.tensor(self.labels)], 32, replacement=True, generator=g) + 1

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"ids": self.ids[index, : self.lengths[index]], "label": self.labels[index]}


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Items made on the fly, others in every pass, with no length."""

    def __init__(self, count: int, features: int, classes: int = 10, noise: float = 1.0) -> None:
        self.count = count
        self.noise = noise
        self.centres = torch.randn(classes, features, generator=_generator())
        self.passes = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        g = _generator(self.passes)
        for _ in range(self.count):
            label = torch.randint(len(self.centres), (), generator=g)
            yield self.centres[label] + self.noise * torch.randn(self.centres.shape[1], generator=g), label


def clusters(count: int, *shape: int, classes: int = 10, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    """Points of any shape around one centre per class."""
    g = _generator()
    centres = torch.randn(classes, *shape, generator=g)
    y = torch.randint(classes, (count,), generator=g)
    return centres[y] + noise * torch.randn(count, *shape, generator=g), y


def images(count: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """Colour images of one coarse pattern per class, with noise."""
    x, y = clusters(count, 3, 4, 4, noise=0.3)
    fine = F.interpolate(x, size=(size, size), mode="nearest")
    return fine + 0.5 * torch.randn(fine.shape, generator=_generator(1)), y


def waves(count: int, length: int = 32, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Noisy two-channel waves; the class is the frequency."""
    g = _generator()
    y = torch.randint(classes, (count,), generator=g)
    phase = torch.arange(length) * (y[:, None] + 1) * 0.2 + 6.28 * torch.rand(count, 1, generator=g)
    wave = torch.stack([phase.sin(), phase.cos()], dim=-1)
    return wave + 0.2 * torch.randn(wave.shape, generator=g), y


def counting(count: int, length: int, words: int) -> Tensor:
    """Token sequences that count up, each by a step of its own from 1 to 3."""
    g = _generator()
    first, stride = torch.randint(words, (count, 1), generator=g), torch.randint(1, 4, (count, 1), generator=g)
    return (first + stride * torch.arange(length)) % words


def pad(items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Collate sentences of uneven length: the width of a batch is that of its longest."""
    ids = nn.utils.rnn.pad_sequence([item["ids"] for item in items], batch_first=True)
    return {"ids": ids, "mask": ids > 0, "label": torch.tensor([item["label"] for item in items])}
