"""Which path a call takes, and what an op costs: the two things every op of this folder asks.

An op stands in `<op>.py` (formula, reference in plain torch, public function) and its kernels in `<op>/triton.py`,
which is imported on first use: without triton everything still runs, on the reference.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from accel.profiler.errors import InvalidState

_interpreted = False


@dataclass(frozen=True)
class Cost:
    """The least work of an op, whatever computes it; for rooflines.

    Attributes:
        flops: floating-point operations.
        bytes: bytes read from and written to device memory.
    """

    flops: float
    bytes: float

    def seconds(self, flops_per_s: float, bytes_per_s: float) -> float:
        """Return the least time on a device: the larger of both limits."""
        return max(self.flops / flops_per_s, self.bytes / bytes_per_s)


# Looked for once, at import: torch 2.11 on Python 3.12 can't trace `find_spec`, and an op asks while it is compiled.
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def has_triton() -> bool:
    """Return whether triton is installed."""
    return _HAS_TRITON


def runs_triton(tensor: Tensor) -> bool:
    """Return whether an op on `tensor` runs its Triton kernels: on CUDA, or within `interpreted`."""
    if _interpreted:
        return True
    if not tensor.is_cuda:
        return False
    if not has_triton():
        _warn_once()
        return False
    return True


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        "accel.kernels: triton is not installed, the plain torch path is used; pip install 'accel-train[gpu]'",
        RuntimeWarning,
        stacklevel=4,
    )


@functools.cache
def _applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    return super(torch.autograd.Function, function).apply  # type: ignore[no-any-return, misc]


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return a function's `apply`, without torch's wrapper in Python where that does nothing: it takes 3 µs."""
    return function.apply if torch._C._are_functorch_transforms_active() else _applied(function)


def is_plain(*tensors: Tensor | None) -> bool:
    """Return whether nothing is to be differentiated, in either direction, and no transform is at work."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return False
    return forward_ad._current_level < 0 and torch._C._functorch.peek_interpreter_stack() is None


@contextmanager
def interpreted() -> Iterator[None]:
    """Run Triton kernels on CPU tensors, in Triton's interpreter: for tests.

    Raises:
        InvalidState: unless TRITON_INTERPRET=1 was set before the kernels were imported.
    """
    global _interpreted
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise InvalidState("TRITON_INTERPRET must be 1 before a kernel is imported; found it unset")
    before, _interpreted = _interpreted, True
    try:
        yield
    finally:
        _interpreted = before
