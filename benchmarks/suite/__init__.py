"""Models that people train, at sizes for two CPU cores, with dropout where the originals have it."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.suite import cnn, ncf, unet
from benchmarks.suite.workload import Workload

MODELS: dict[str, Callable[[], Workload]] = {"cnn": cnn.make, "ncf": ncf.make, "unet": unet.make}

__all__ = ["MODELS", "Workload"]
