"""Copies of tensors to a GPU: which calls of `Tensor.to` and `Tensor.cuda` are some, and how to pass calls on."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from accel.profiler.clocks.probes import Function

NAMES = ("to", "cuda")
"""Methods of a tensor that may copy it to a GPU."""


def call(original: Function, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call a method of torch.Tensor that has been replaced, for a tensor of any class.

    A subclass is told which method of torch's is called, and compares that with those it knows: torchvision's boxes
    become plain tensors, and a lazy parameter raises, if they are told of the replacement, which torch would find.
    """
    if has_torch_function_unary(tensor):
        return handle_torch_function(original, (tensor,), tensor, *args, **kwargs)
    return original(tensor, *args, **kwargs)


def marked(original: Function, copying: Callable[[], Callable[[], None] | None], thread: int) -> Function:
    """Return a method that may copy a tensor to a GPU, marked.

    Args:
        original: `Tensor.to` or `Tensor.cuda`.
        copying: called before a copy to a GPU; returns what to call after it, None if this one does not count.
        thread: of which calls count, by Python's id.
    """
    is_cuda, process = getattr(original, "__name__", "") == "cuda", os.getpid()

    @functools.wraps(original)
    def choosing(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        # A process that was forked meanwhile, such as a loader's worker, has a main thread of the same id.
        is_other = get_ident() != thread or os.getpid() != process or tensor.is_cuda
        if is_other or not (is_cuda or _is_gpu(*args[:1], **kwargs)) or (copied := copying()) is None:
            return call(original, tensor, *args, **kwargs)
        try:
            return call(original, tensor, *args, **kwargs)
        finally:
            copied()

    return choosing


def _is_gpu(target: Any = None, /, *, device: Any = None, other: Any = None, **more: Any) -> bool:
    """Return whether `Tensor.to` with these arguments copies to a GPU; a number is the index of one."""
    target = next((given for given in (target, device, other) if given is not None), None)
    if isinstance(target, Tensor):
        return target.is_cuda
    if isinstance(target, torch.device):
        return target.type == "cuda"
    return isinstance(target, int) or (isinstance(target, str) and target.startswith("cuda"))
