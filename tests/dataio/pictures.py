"""Encoded images for the tests."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image", reason="needs Pillow, which the extra `images` brings")


def scene(height: int, width: int, seed: int = 0) -> Any:
    """Return a Pillow image with large, middle and fine structure, as photographs have."""
    rng = np.random.default_rng(seed)
    total = np.zeros((height, width, 3))
    for coarse, weight in ((64, 0.5), (16, 0.3), (4, 0.12), (1, 0.08)):
        small = rng.integers(0, 256, (-(-height // coarse) + 1, -(-width // coarse) + 1, 3), np.uint8)
        layer = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
        total += weight * np.asarray(layer)
    return Image.fromarray(total.clip(0, 255).astype(np.uint8))


def encoded(image: Any, kind: str = "JPEG", **options: Any) -> bytes:
    """Return the file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def jpeg(height: int, width: int, seed: int = 0, **options: Any) -> bytes:
    """Return a scene as JPEG, quality 85."""
    return encoded(scene(height, width, seed), quality=85, **options)


def turned(data_of: Any, orientation: int) -> bytes:
    """Return an image as JPEG with an EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(data_of, exif=exif, quality=95)
