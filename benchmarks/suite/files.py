"""Data as a real loader has it: each sample is read from a file, images are decoded and normalised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.suite.workload import Workload

_FOLDER = Path(__file__).resolve().parents[2] / ".data" / "suite"
_MOST_FILES = 512
"""Samples beyond that read the same files again; 512 photographs are more than a cache of the processor holds."""


def from_files(workload: Workload, folder: Path = _FOLDER) -> Workload:
    """Return the workload with inputs from files under a folder, which are made once; targets stay as they are.

    Inputs of one or three channels become JPEG files of smooth pictures, all others one row each of an `.npy` file.

    Args:
        workload: with a `DataLoader` over a `TensorDataset` of inputs and targets.
        folder: where the files are kept.

    Raises:
        ValueError: if the loader is another.
    """
    loader = workload.loader
    tensors: Any = getattr(getattr(loader, "dataset", None), "tensors", ())
    if len(tensors) != 2:
        raise ValueError(f"loader must yield inputs and targets of a TensorDataset. Found: {type(loader).__name__}")
    inputs, targets = tensors
    is_image = inputs.dim() == 4 and inputs.shape[1] in (1, 3) and inputs.is_floating_point()
    data: Dataset[Any] = JpegSamples(inputs, targets, folder) if is_image else RowSamples(inputs, targets, folder)
    return workload._replace(loader=DataLoader(data, loader.batch_size, shuffle=True))


class JpegSamples(Dataset[tuple[Tensor, Tensor]]):
    """Pictures of the shape of given inputs [N, C, H, W], decoded and normalised when they are asked for."""

    def __init__(self, inputs: Tensor, targets: Tensor, folder: Path) -> None:
        _, channels, height, width = inputs.shape
        self.targets, self.channels = targets, channels
        self.folder = folder / f"{channels}x{height}x{width}"
        self.count = min(len(targets), _MOST_FILES)
        self.folder.mkdir(parents=True, exist_ok=True)
        _make_pictures([self._path(index) for index in range(self.count)], channels, height, width)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        from PIL import Image

        with Image.open(self._path(index % self.count)) as picture:
            pixels = torch.from_numpy(np.array(picture, np.float32)).div_(127.5).sub_(1.0)
        return pixels.reshape(*pixels.shape[:2], self.channels).permute(2, 0, 1).contiguous(), self.targets[index]

    def _path(self, index: int) -> Path:
        return self.folder / f"{index:05}.jpg"


class RowSamples(Dataset[tuple[Tensor, Tensor]]):
    """Rows of given inputs [N, …], each read from a mapped file when it is asked for."""

    def __init__(self, inputs: Tensor, targets: Tensor, folder: Path) -> None:
        self.targets = targets
        kind = str(inputs.dtype).removeprefix("torch.")
        self.path = folder / f"{kind}-{'x'.join(map(str, inputs.shape))}.npy"
        folder.mkdir(parents=True, exist_ok=True)
        if not self.path.is_file():
            part = self.path.with_suffix(".part.npy")
            np.save(part, inputs.numpy())
            part.replace(self.path)
        self.rows = np.load(self.path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(np.array(self.rows[index])), self.targets[index]


def _make_pictures(paths: list[Path], channels: int, height: int, width: int) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for path in paths:
        coarse = rng.integers(0, 256, (max(height // 8, 2), max(width // 8, 2), 3), np.uint8)
        if path.is_file():
            continue
        picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        part = path.with_suffix(".part")
        (picture if channels == 3 else picture.convert("L")).save(part, "JPEG", quality=90)
        part.replace(path)
