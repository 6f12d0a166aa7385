"""Models that people train, with dropout where the originals have it: tiny for two CPU cores, full for one GPU."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.suite import bert, cnn, fcos3d, gan, gpt, lstm, ncf, resnet, swin, unet, vgg, vit, yolox
from benchmarks.suite.workload import Size, Workload

MODELS: dict[str, Callable[[Size], Workload]] = {
    "cnn": cnn.make,
    "resnet": resnet.make,
    "vgg": vgg.make,
    "vit": vit.make,
    "swin": swin.make,
    "unet": unet.make,
    "yolox": yolox.make,
    "fcos3d": fcos3d.make,
    "gan": gan.make,
    "bert": bert.make,
    "gpt": gpt.make,
    "lstm": lstm.make,
    "ncf": ncf.make,
}

__all__ = ["MODELS", "Size", "Workload"]
