"""The libraries that decode images, asked for when the first image is read or the first pipeline built."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any


@cache
def simplejpeg() -> Any:
    """Return the module simplejpeg: libjpeg-turbo that gives up the GIL."""
    return _need("simplejpeg", "simplejpeg")


@cache
def pillow() -> Any:
    """Return Pillow's module Image."""
    return _need("PIL.Image", "Pillow")


@cache
def dali() -> Any:
    """Return the package nvidia.dali, with its `fn`, `types` and `plugin.pytorch` loaded."""
    for part in ("fn", "types", "plugin.pytorch"):
        _need(f"nvidia.dali.{part}", "DALI", "dali-cu13]' or 'accel-train[dali-cu12")
    return _need("nvidia.dali", "DALI", "dali-cu13")


def _need(module: str, name: str, extra: str = "images") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise ImportError(
            f"accel.dataio reads images with {name}, which cannot be imported ({missing}); pip install "
            f"'accel-train[{extra}]'"
        ) from missing
