"""What a person would set by hand, exact or reordered, and what is worth trying for each model of the suite."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.suite import Workload

RECIPES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "cnn": (("allocator", "channels_last"), ("allocator", "channels_last", "foreach"), ("allocator", "compile")),
    "resnet": (("allocator",), ("allocator", "fused"), ("allocator", "channels_last"), ("allocator", "compile")),
    "vgg": (("allocator", "fused"), ("allocator", "channels_last", "fused"), ("allocator", "compile")),
    "vit": (("allocator", "fused"), ("allocator", "fused", "compile")),
    "swin": (("allocator", "fused"), ("allocator", "fused", "compile")),
    "unet": (("allocator", "channels_last"), ("allocator", "channels_last", "fused"), ("allocator", "compile")),
    "yolox": (("allocator", "channels_last"), ("allocator", "channels_last", "fused"), ("allocator", "compile")),
    "fcos3d": (("allocator", "channels_last"), ("allocator", "channels_last", "fused"), ("allocator", "compile")),
    "gan": (("allocator",), ("allocator", "channels_last", "fused"), ("allocator", "fused", "compile")),
    "bert": (("allocator", "fused"), ("allocator", "fused", "compile")),
    "gpt": (("allocator", "fused"), ("allocator", "fused", "compile")),
    "lstm": (("allocator",), ("allocator", "fused")),
    "ncf": (("allocator", "fused"), ("allocator", "fused", "workers"), ("allocator", "fused", "compile")),
}
"""Model → lists of settings to try; the fastest is the hand-tuned best. Earlier settings are put on first. The first
list is also the plan of the variant "planned", which must not be slower than plain on any CPU."""

PUBLISHED = ("channels_last", "fused", "compile")
"""What PyTorch's Performance Tuning Guide and its torch.compile tutorial advise for every model, at the same
precision."""


def by_hand(workload: Workload, settings: Sequence[str]) -> Workload:
    """Return a workload with these settings.

    Args:
        workload: before its first step.
        settings: names in `SETTINGS`.

    Raises:
        ValueError: if there is no such setting.
    """
    for name in settings:
        if name not in SETTINGS:
            raise ValueError(f"settings must be among {', '.join(SETTINGS)}. Found: {name}")
        workload = SETTINGS[name](workload)
    return workload


def _allocator(workload: Workload) -> Workload:
    """Keep freed memory in the process: what MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=… does at its start."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    return workload


def _channels_last(workload: Workload) -> Workload:
    model: Any = workload.model
    model.to(memory_format=torch.channels_last)
    return workload._replace(loader=ChannelsLastBatches(workload.loader))


class ChannelsLastBatches:
    """A loader whose images come in NHWC memory order."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for x, target in self.loader:
            yield (x.to(memory_format=torch.channels_last) if _is_image(x) else x), target

    def __len__(self) -> int:
        return len(self.loader)


def _is_image(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 4 and x.is_floating_point()


def _path(name: str) -> Callable[[Workload], Workload]:
    def set_path(workload: Workload) -> Workload:
        for group in workload.optimizer.param_groups:
            if name in group:  # Adadelta has no fused path
                group.update({path: path == name for path in ("foreach", "fused") if path in group})
        return workload

    return set_path


def _compile(workload: Workload) -> Workload:
    compiled: Any = torch.compile(workload.model)
    return workload._replace(model=compiled)


def _workers(workload: Workload) -> Workload:
    """Fetch in one worker process, which stays from epoch to epoch."""
    loader: DataLoader[Any] = workload.loader
    shuffled = DataLoader(
        loader.dataset, loader.batch_size, shuffle=True, num_workers=1, persistent_workers=True, prefetch_factor=4
    )
    return workload._replace(loader=shuffled)


SETTINGS: Mapping[str, Callable[[Workload], Workload]] = {
    "allocator": _allocator,
    "channels_last": _channels_last,
    "fused": _path("fused"),
    "foreach": _path("foreach"),
    "workers": _workers,
    "compile": _compile,
}

STRATEGIES: Mapping[str, tuple[str, Any]] = {
    "allocator": ("allocator", None),
    "channels_last": ("channels_last", None),
    "fused": ("fused_optimizer", "fused"),
    "foreach": ("fused_optimizer", "foreach"),
}
"""Setting → the strategy of accel that does the same, and its setting; a model's first recipe has none but these."""
