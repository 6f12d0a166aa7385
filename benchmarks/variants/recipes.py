"""What a person would set by hand, and what of it is worth trying for each model of the suite: on a CPU exact or
reordered."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accel.profiler.host import usable_cores
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

ON_A_GPU = ("tf32", "nhwc", "fused", "pinned_workers", "compile", "bf16")
"""What somebody who knows a GPU would write at once."""


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


def _nhwc(workload: Workload) -> Workload:
    """Have weights and images in NHWC memory order; images are copied as they are, and turned on the device."""
    model: Any = workload.model
    model.to(memory_format=torch.channels_last)
    model.register_forward_pre_hook(lambda _, inputs: tuple(map(_in_nhwc, inputs)))
    return workload


def _in_nhwc(x: Any) -> Any:
    return x.contiguous(memory_format=torch.channels_last) if _is_image(x) else x


def _tf32(workload: Workload) -> Workload:
    torch.set_float32_matmul_precision("high")
    return workload


class InAutocast(nn.Module):
    """A model whose calls are in an autocast."""

    def __init__(self, model: Any, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.model, self._autocast = model, autocast

    def forward(self, x: Any) -> Any:
        """Call the model."""
        with self._autocast():
            return self.model(x)


def in_autocast(workload: Workload, model: Any, autocast: Callable[[], AbstractContextManager[Any]]) -> Workload:
    """Return the workload with a model and its loss in an autocast."""

    def loss(output: Any, target: Any) -> Tensor:
        with autocast():
            return workload.loss(output, target)

    return workload._replace(model=InAutocast(model, autocast), loss=loss)


def _bf16(workload: Workload) -> Workload:
    device = next(workload.model.parameters()).device.type
    return in_autocast(workload, workload.model, partial(torch.autocast, device, torch.bfloat16))


def _workers(workload: Workload, count: int = 1, **options: Any) -> Workload:
    """Fetch in worker processes, which stay from epoch to epoch."""
    loader: DataLoader[Any] = workload.loader
    fetching: dict[str, Any] = {"num_workers": count, "persistent_workers": True, "prefetch_factor": 4, **options}
    return workload._replace(loader=DataLoader(loader.dataset, loader.batch_size, sampler=loader.sampler, **fetching))


def _pinned_workers(workload: Workload) -> Workload:
    """Fetch in up to eight worker processes, into pinned memory, and copy without waiting."""
    pinned = _workers(workload, min(8, usable_cores()), pin_memory=torch.cuda.is_available())
    return pinned._replace(non_blocking=True)


SETTINGS: Mapping[str, Callable[[Workload], Workload]] = {
    "allocator": _allocator,
    "channels_last": _channels_last,
    "fused": _path("fused"),
    "foreach": _path("foreach"),
    "workers": _workers,
    "compile": _compile,
    "nhwc": _nhwc,
    "tf32": _tf32,
    "bf16": _bf16,
    "pinned_workers": _pinned_workers,
}

STRATEGIES: Mapping[str, tuple[str, Any]] = {
    "allocator": ("allocator", None),
    "channels_last": ("channels_last", None),
    "fused": ("fused_optimizer", "fused"),
    "foreach": ("fused_optimizer", "foreach"),
}
"""Setting → the strategy of accel that does the same, and its setting; a model's first recipe has none but these."""
