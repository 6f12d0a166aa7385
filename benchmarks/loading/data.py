"""Real data for the demo: Fashion-MNIST from wherever it can be had, otherwise scikit-learn's digits, said plainly."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.record import DATA

_CACHE = DATA / "fashion-mnist"
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_PUBLIC = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


class Images(Dataset[tuple[Tensor, int]]):
    """Grey images, normalised one by one as most scripts do it.

    Args:
        pixels: uint8 of shape [N, H, W].
        labels: uint8 of shape [N].
        mean: mean of pixels ÷ 255.
        std: standard deviation of pixels ÷ 255.
    """

    def __init__(self, pixels: NDArray[np.uint8], labels: NDArray[np.uint8], mean: float, std: float) -> None:
        self.pixels = pixels
        self.labels = labels
        self.mean = mean
        self.std = std

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.from_numpy(self.pixels[index].astype(np.float32))
        return image.div_(255).sub_(self.mean).div_(self.std).unsqueeze(0), int(self.labels[index])


@dataclass(frozen=True)
class Data:
    """A training and a test set, and where they come from."""

    train: Images
    test: Images
    source: str
    """In words."""
    classes: int = 10


def load(folder: str | None = None) -> Data:
    """Return Fashion-MNIST from `folder`, $ACCEL_DATA, Debian's package or its public download; else the digits."""
    found = _find(folder)
    if found is None:
        return _digits()
    train, test = (_split(found, name) for name in ("train", "t10k"))
    return Data(Images(*train, 0.2860, 0.3530), Images(*test, 0.2860, 0.3530), f"Fashion-MNIST ({found[1]})")


def _find(folder: str | None) -> tuple[Path, str] | None:
    places = [(folder, "local folder"), (os.environ.get("ACCEL_DATA"), "$ACCEL_DATA"), (_DEBIAN, "Debian package")]
    for place, words in [*places, (_CACHE, "downloaded before")]:
        if place and all((Path(place) / name).is_file() for name in _FILES):
            return Path(place), words
    if folder:
        raise FileNotFoundError(f"{folder} must hold {', '.join(_FILES)}")
    if _from_debian():
        return _CACHE, "Debian package dataset-fashion-mnist"
    if _from_public():
        return _CACHE, "public download"
    return None


def _from_debian() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        return unpack_debian(["dataset-fashion-mnist"], folder) and _keep(folder + str(_DEBIAN))


def unpack_debian(packages: list[str], folder: str) -> bool:
    """Fetch Debian's packages and unpack them into a folder without installing them: no root needed."""
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        return False
    download = ["apt-get", "-qq", "download", *packages]
    if _run(download, folder) and (_run(["apt-get", "-qq", "update"], folder) or _run(download, folder)):
        return False
    files = list(Path(folder).glob("*.deb"))
    return len(files) >= len(packages) and not any(_run(["dpkg", "-x", str(file), folder], folder) for file in files)


def _run(command: list[str], folder: str) -> int:
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, timeout=120, check=False).returncode
    except (OSError, subprocess.TimeoutExpired):
        return 1


def _from_public() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in _FILES:
                with urllib.request.urlopen(f"{_PUBLIC}/{name}", timeout=20) as reply:
                    (Path(folder) / name).write_bytes(reply.read())
        except OSError:
            return False
        return _keep(folder)


def _keep(folder: str) -> bool:
    if not all((Path(folder) / name).is_file() for name in _FILES):
        return False
    _CACHE.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        shutil.copy(Path(folder) / name, _CACHE / name)
    return True


def _split(found: tuple[Path, str], name: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    images = gzip.decompress((found[0] / f"{name}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((found[0] / f"{name}-labels-idx1-ubyte.gz").read_bytes())
    return np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28, 28), np.frombuffer(labels, np.uint8, offset=8)


def _digits() -> Data:
    """scikit-learn's 1,797 digits, enlarged to 28 x 28 and repeated to the length of an epoch worth measuring."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.kron(digits.images.astype(np.uint8) * 15, np.ones((1, 3, 3), np.uint8))
    pixels = np.pad(pixels, ((0, 0), (2, 2), (2, 2)))
    labels = digits.target.astype(np.uint8)
    repeat = 40
    train = np.tile(pixels[:1500], (repeat, 1, 1)), np.tile(labels[:1500], repeat)
    words = "scikit-learn's digits, repeated 40 times: Fashion-MNIST was not found"
    return Data(Images(*train, 0.13, 0.3), Images(pixels[1500:], labels[1500:], 0.13, 0.3), words)
