"""What decides, beside the inputs, which kernels run: modes of torch, and switches of its libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

_BACKENDS: Any = torch.backends


def modes(inputs: Sequence[Tensor]) -> Hashable:
    """Return all that a graph goes on with as it was at its capture.

    Args:
        inputs: of the call; their device decides which autocast counts.
    """
    kind, backends = _kind(inputs), _BACKENDS
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        torch.are_deterministic_algorithms_enabled(),
        tuple([backend.fp32_precision for backend in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)]),
        (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        (
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
            backends.cuda.cudnn_sdp_enabled(),
        ),
    )


def without_cached_casts(inputs: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Return autocast as it is, with no weight taken from its cache or kept there: such a copy is a graph's own."""
    kind = _kind(inputs)
    if not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False)


def _kind(inputs: Sequence[Tensor]) -> str:
    return next((tensor.device.type for tensor in inputs), "cuda")
