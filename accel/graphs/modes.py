"""What decides, beside the inputs, which kernels run: modes of torch, and switches of its libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._device import DeviceContext

_BACKENDS: Any = torch.backends


def modes(kind: str) -> Hashable:
    """Return all that a graph goes on with as it was at its capture.

    Args:
        kind: of the device that it runs on, "cuda": its autocast counts.
    """
    backends = _BACKENDS
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        torch.are_deterministic_algorithms_enabled(),
        default_device(),
        tuple([backend.fp32_precision for backend in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)]),
        (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        (
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
            backends.cuda.cudnn_sdp_enabled(),
        ),
    )


def default_device() -> torch.device | None:
    """Return where tensors are made that are given no device, None if nobody has set it."""
    own = [mode for mode in _function_modes() if isinstance(mode, DeviceContext)]
    return own[-1].device if own else None


def is_watched() -> bool:
    """Return whether a mode of torch looks at each function; a default device is one that doesn't."""
    return any(not isinstance(mode, DeviceContext) for mode in _function_modes())


def _function_modes() -> list[Any]:
    count = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(place) for place in range(count)]


def outside_autocast(kind: str) -> AbstractContextManager[Any]:
    """Return no autocast, for a backward pass that is captured within a call under autocast: it belongs outside."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def without_cached_casts(kind: str) -> AbstractContextManager[Any]:
    """Return autocast as it is, with no weight taken from its cache or kept there: such a copy is a graph's own."""
    if not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False)
