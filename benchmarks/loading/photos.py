"""Photographs as JPEG files of one size: cuts of Debian's wallpapers, encoded anew; made pictures without them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loading.data import unpack_debian
from benchmarks.record import DATA

_CACHE = DATA / "photos"
_PACKAGES = ["lomiri-wallpapers-16.04", "lomiri-wallpapers-20.04"]  # 19 photographs and drawings, CC-BY, CC-BY-SA


def jpegs(number: int, width: int = 500, height: int = 375) -> tuple[list[Path], str]:
    """Return JPEG files, quality 80 to 92 at random, and in words what they are.

    Args:
        number: of files; they are made once and kept under .data.
        width: pixels; 500 x 375 is the commonest size in ImageNet.
        height: pixels.
    """
    wallpapers = _wallpapers()
    folder = _CACHE / f"{'wallpapers' if wallpapers else 'made'}-{width}x{height}"
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{index:05}.jpg" for index in range(number)]
    if not all(file.is_file() for file in files):
        _make(files, wallpapers, width, height)
    mean = sum(file.stat().st_size for file in files) / number
    words = f"{len(wallpapers)} wallpapers, cut at random" if wallpapers else "made pictures: no wallpapers were found"
    return files, f"{number} JPEG files {width} x {height}, quality 80 to 92, mean {mean / 1000:.0f} kB, of {words}"


def _wallpapers() -> list[Path]:
    kept = _CACHE / "originals"
    if not kept.is_dir():
        with tempfile.TemporaryDirectory() as folder:
            if not unpack_debian(_PACKAGES, folder):
                return []
            shutil.copytree(Path(folder) / "usr" / "share" / "backgrounds", kept)
    return sorted(kept.glob("*.jpg"))


def _make(files: list[Path], wallpapers: list[Path], width: int, height: int) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    originals = [Image.open(path).convert("RGB") for path in wallpapers]
    for index, file in enumerate(files):
        if originals:
            picture = _cut(originals[index % len(originals)], rng, width, height)
        else:
            coarse = Image.fromarray(rng.integers(0, 256, (height // 8, width // 8, 3), np.uint8))
            picture = coarse.resize((width, height), Image.Resampling.BICUBIC)
        picture.save(file, quality=int(rng.integers(80, 93)))


def _cut(original: Any, rng: np.random.Generator, width: int, height: int) -> Any:
    """Return a part of a wallpaper, scaled down to the size."""
    zoom = rng.uniform(1, min(original.width / width, original.height / height))
    wide, tall = int(width * zoom), int(height * zoom)
    left, top = rng.integers(0, original.width - wide + 1), rng.integers(0, original.height - tall + 1)
    return original.resize((width, height), box=(left, top, left + wide, top + tall), reducing_gap=3)
