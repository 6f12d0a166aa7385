"""Reads of a device's values, answered from what the same place in the code read before, without a wait.

What a read returns decides what the script does, so the answer has the type, dtype and shape of the true one, and each
64th is the true one: a loop that goes on until a value changes must come to its end. `Tensor.numpy()` needs nothing, a
tensor on a device has none. `Tensor.cpu()` is answered for single values without gradients only: larger tensors are
what checkpoints are made of.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from accel.profiler.clocks.probes import Patches

READS = ("item", "tolist", "cpu", "__float__", "__int__", "__bool__", "__index__")
_ANEW = 64
_TENSOR_FILE = Tensor.__format__.__code__.co_filename

_Place = tuple[Any, ...]


def _on_device(tensor: Tensor) -> bool:
    # A class of its own (a fake or a distributed tensor) may mean something else by a read.
    return type(tensor) in (Tensor, nn.Parameter) and tensor.is_cuda


class StaleReads:
    """Reads on the device return what the same place read before, without waiting for the device.

    Args:
        waits: tells whether reading a tensor waits; default: it lies on a CUDA device.

    Attributes:
        answered: reads that did not wait.
    """

    name = "no waiting for values"
    what = "item(), float() and the like returned what the same place had read before, without waiting for the device"
    changes_learning = True

    def __init__(self, waits: Callable[[Tensor], bool] = _on_device) -> None:
        self.answered = 0
        self._waits = waits
        self._known: dict[_Place, tuple[Tensor, int]] = {}
        self._patches = Patches()

    def enable(self) -> None:
        """Read nothing that is known."""
        for name in READS:
            self._patches.replace(Tensor, name, functools.partial(self._reading, name))

    def disable(self) -> None:
        """Read everything."""
        self._patches.remove()

    def worked(self) -> bool:
        """Tell whether any read was answered without a wait."""
        return self.answered > 0

    def _reading(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._waits(tensor) or (name == "cpu" and not _is_plain_value(tensor)):
                return original(tensor, *args, **kwargs)
            frame: Any = sys._getframe(1)
            while frame.f_code.co_filename == _TENSOR_FILE:  # an f-string asks through Tensor.__format__
                frame = frame.f_back
            held = self._held((name, frame.f_code, frame.f_lasti, tensor.dtype, tensor.shape), tensor)
            return held.clone() if name == "cpu" else original(held, *args, **kwargs)

        return read

    def _held(self, place: _Place, tensor: Tensor) -> Tensor:
        """Return on the CPU what a place read before, or, where that is nothing or too old, what it reads now."""
        held, uses = self._known.get(place, (None, 0))
        if held is None or uses >= _ANEW - 1:
            held, uses = tensor.detach().to("cpu", copy=True), 0
        else:
            self.answered += 1
            uses += 1
        self._known[place] = held, uses
        return held


def _is_plain_value(tensor: Tensor) -> bool:
    return tensor.numel() == 1 and not (tensor.requires_grad and torch.is_grad_enabled())
