"""Reads of values on a device, answered by what the same call site read before, without waiting.

What a read returns decides what the script does, so the answer has the type, dtype and shape of the true value, and
every 64th read is a true one: a loop that goes on until a value changes must terminate. Without gradients all reads are
true: what an evaluation finds is printed, or decides. So are those of a gradient scaler, which leaves an update out
where it reads of an infinite gradient: by an older answer it would make all weights NaN. `Tensor.numpy()` is not
replaced, since tensors on a device don't have it. `Tensor.cpu()` is answered only for single values without gradients:
larger tensors are what checkpoints are made of.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from accel.profiler.loop.patches import Patches, call_method, replace_reads

_TRUE_READ_EVERY = 64
_TENSOR_FILE = Tensor.__format__.__code__.co_filename
_SCALER = "grad_scaler.py"
"""How the names of files end that hold one: torch.amp's, that of FSDP, and those of other libraries."""

_Site = tuple[Any, ...]


def _on_device(tensor: Tensor) -> bool:
    # To a subclass (a fake or a distributed tensor) a read may mean something else.
    return type(tensor) in (Tensor, nn.Parameter) and tensor.is_cuda


class StaleReads:
    """Reads on the device return what the same call site read before, without waiting for the device.

    Args:
        waits: returns whether reading a tensor waits; default: it is on a CUDA device.

    Attributes:
        answered: reads that did not wait.
    """

    def __init__(self, waits: Callable[[Tensor], bool] = _on_device) -> None:
        self.answered = 0
        self._waits = waits
        self._values: dict[_Site, tuple[Tensor, int]] = {}
        self._patches = Patches()

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Answer reads from stored values while this is entered."""
        replace_reads(self._patches, self._reading)
        try:
            yield
        finally:
            self._patches.remove()

    def _reading(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if (
                not self._patches.on
                or not torch.is_grad_enabled()
                or not self._waits(tensor)
                or (name == "cpu" and (tensor.numel() != 1 or tensor.requires_grad))
            ):
                return call_method(original, tensor, *args, **kwargs)
            frame: Any = sys._getframe(1)
            while frame.f_code.co_filename == _TENSOR_FILE:  # an f-string reads through Tensor.__format__
                frame = frame.f_back
            if frame.f_code.co_filename.endswith(_SCALER):
                return original(tensor, *args, **kwargs)
            site = (name, frame.f_code, frame.f_lasti, tensor.dtype, tensor.shape)
            value = self._value_at(site, tensor)
            return value.clone() if name == "cpu" else original(value, *args, **kwargs)

        return read

    def _value_at(self, site: _Site, tensor: Tensor) -> Tensor:
        """Return, on the CPU, the value that a call site read before or, if that is missing or too old, reads now."""
        value, uses = self._values.get(site, (None, 0))
        if value is None or uses >= _TRUE_READ_EVERY - 1:
            value, uses = tensor.detach().to("cpu", copy=True), 0
        else:
            self.answered += 1
            uses += 1
        self._values[site] = value, uses
        return value
