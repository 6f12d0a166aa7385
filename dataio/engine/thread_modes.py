"""The modes of torch that hold in one thread alone: a thread that makes the loop's batches takes them on."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch

_DEVICES = ("cpu", "cuda")


class ThreadModes(NamedTuple):
    """Modes of a thread.

    Example:
        >>> with torch.no_grad():
        ...     modes = ThreadModes.now()
        >>> with modes.entered():
        ...     torch.is_grad_enabled()
        False
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    """Devices with it, and the dtype."""
    device: torch.device
    """On which tensors are made."""

    @classmethod
    def now(cls) -> ThreadModes:
        """Return those of this thread."""
        cast = tuple((each, torch.get_autocast_dtype(each)) for each in _DEVICES if torch.is_autocast_enabled(each))
        # torch.get_default_device() raises in torch 2.9 after set_default_device(None).
        device = torch.empty(0).device
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast, device)

    def entered(self) -> contextlib.ExitStack:
        """Return a context in which they hold in a thread that has none."""
        stack = contextlib.ExitStack()
        if not self.grad:
            stack.enter_context(torch.no_grad())
        if self.inference:
            stack.enter_context(torch.inference_mode())
        for device, dtype in self.autocast:
            stack.enter_context(torch.autocast(device, dtype))
        if self.device.type != "cpu":
            stack.enter_context(self.device)
        return stack
