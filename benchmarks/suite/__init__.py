"""Models that people train, with dropout where the originals have it: tiny for two CPU cores, full for one GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

from benchmarks.suite.workload import Size, Workload, train_step


def _make(name: str, size: Size) -> Workload:
    # Imported when it is made: a process that trains one model shall not pay for the imports of others.
    workload: Workload = importlib.import_module(f"benchmarks.suite.{name}").make(size)
    return workload


MODELS: dict[str, Callable[[Size], Workload]] = {
    name: partial(_make, name)
    for name in (
        *("cnn", "resnet", "vgg", "vit", "swin", "unet", "yolox", "fcos3d", "gan"),
        *("bert", "gpt", "lstm", "ncf"),
    )
}

__all__ = ["MODELS", "Size", "Workload", "train_step"]
