"""The jobs of the loader benchmark: a dataset, a batch size, and how long the step after each batch takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from accel.dataio.image_geometry import Resize
from accel.dataio.images import ImageDataset, collate_images
from benchmarks.loading import data, photos


@dataclass(frozen=True)
class Job:
    """One training loop that does nothing with its batches but wait."""

    name: str
    dataset: Callable[[], Dataset[Any]]
    batch_size: int
    step_s: float
    """Slept after each batch: a GPU that computes and leaves the processor alone."""
    collate: Callable[[Any], Any] | None = None
    epochs: int = 4
    """In one turn; the first is not counted."""


class SmallImages(Dataset[tuple[Tensor, Tensor]]):
    """Fashion-MNIST with a few operations on each sample, as a first training script has them."""

    def __init__(self, count: int) -> None:
        images, labels = _fashion(count)
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return (self.images[index].float().unsqueeze(0) / 255 - 0.2860) / 0.3530, self.labels[index]


class WholeBatches(SmallImages):
    """The same, asked for a list of samples at once; the collate function has nothing left to do."""

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices)
        return (self.images[chosen].float().unsqueeze(1) / 255 - 0.2860) / 0.3530, self.labels[chosen]


class Photos(Dataset[tuple[Tensor, int]]):
    """JPEG files, by default 160 x 120, decoded by Pillow and resized, by default to 112 x 112."""

    def __init__(self, count: int, width: int = 160, height: int = 120, side: int = 112) -> None:
        self.files: list[Path] = photos.jpegs(count, width, height)[0]
        self.side = side

    # Each sample opens a file of its own, so that threads may read it.
    thread_safe = True

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        import numpy as np
        from PIL import Image

        with Image.open(self.files[index]) as picture:
            small = picture.convert("RGB").resize((self.side, self.side), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(small)).permute(2, 0, 1), index % 10


def decoded_by_us(count: int, width: int, height: int, side: int) -> ImageDataset:
    """Return the samples of `Photos`."""
    files = photos.jpegs(count, width, height)[0]
    return ImageDataset([(file, index % 10) for index, file in enumerate(files)], Resize(side))


class Remote(Dataset[Tensor]):
    """Samples that come from far away: each takes 2 ms of waiting."""

    thread_safe = True

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.002)
        return torch.full((100,), float(index))


class Bursts(Dataset[Tensor]):
    """Samples that cost next to nothing, but for one in 256 that is waited for."""

    thread_safe = True

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> Tensor:
        if index % 256 == 0:
            time.sleep(0.06)
        return torch.full((100,), float(index))


class Trivial(Dataset[Tensor]):
    """Samples that cost nothing: what is left is the start of the epoch."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(8) + index


def as_it_is(batch: Any) -> Any:
    """Return what `__getitems__` has put together already."""
    return batch


def _fashion(count: int) -> tuple[Tensor, Tensor]:
    train = data.load().train
    images, labels = torch.from_numpy(train.pixels.copy()), torch.from_numpy(train.labels.copy()).long()
    repeats = -(-count // len(images))
    return images.repeat(repeats, 1, 1)[:count].contiguous(), labels.repeat(repeats)[:count]


SMALL = Job("2,000 small images, 3 ms step", lambda: SmallImages(2000), 64, 0.003)
PHOTOS = Job("500 small JPEG, 12 ms step", lambda: Photos(500), 32, 0.012)
LARGE = Job("512 JPEG 500x375 to 224x224, 30 ms step", lambda: Photos(512, 500, 375, 224), 64, 0.03)
LARGE_OURS = Job(LARGE.name, lambda: decoded_by_us(512, 500, 375, 224), LARGE.batch_size, LARGE.step_s, collate_images)
"""The same job, its files decoded by `ImageDataset`."""
TINY = Job("60,000 tiny samples, no step", lambda: WholeBatches(60000), 64, 0.0, as_it_is, epochs=3)
FAR = Job("256 samples from far away, 3 ms step", Remote, 8, 0.003)
STARTS = Job("epochs of 8 batches, trivial samples", lambda: Trivial(64), 8, 0.0, epochs=6)
BURSTS = Job("2,048 samples, one in 256 takes 60 ms, 3 ms step", Bursts, 8, 0.003)
