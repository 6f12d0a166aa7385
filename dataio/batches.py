"""What two batches of any structure have in common: their kind, their content, memory."""

from __future__ import annotations

import dataclasses
import datetime
import enum
from collections.abc import Hashable, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel.profiler.interruptions import ours
from accel.profiler.trees import is_dataclass, leaves, shape_of, tensors


def describe(batch: Any) -> tuple[int, Hashable]:
    """Return the number of samples, 0 if unknown, and what two batches of the same kind share: their tensors' shapes.

    The number of samples is the first dimension of the first tensor that has one. Called for every batch: 2 µs for a
    pair of tensors. What can't be looked through, such as links in a circle, has no size.
    """
    try:
        if type(batch) in (tuple, list):
            # Not by a call for each: it takes as long again.
            shapes = [shape_of(leaf) if leaf.is_nested else leaf.shape for leaf in batch if type(leaf) is Tensor]
            if len(shapes) != len(batch):
                shapes = [shape_of(tensor) for tensor in tensors(batch)]
        else:
            shapes = [shape_of(tensor) for tensor in tensors(batch)]
    except ours():
        return 0, ()
    return next((shape[0] for shape in shapes if shape), 0), tuple(shapes)


def equal(batch: Any, other: Any) -> bool:
    """Return whether two batches hold the same bits in the same structure; NaN equals NaN."""
    left, right = list(leaves(batch)), list(leaves(other))
    return len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right, strict=True))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.is_nested or b.is_nested:
            return False  # they can't be compared by torch's operators
        if a.shape != b.shape or a.dtype != b.dtype or a.grad_fn is not None or b.grad_fn is not None:
            return False  # a graph has no bits: it is lost in another process, and of old weights in a thread
        if a.is_floating_point() or a.is_complex():
            return bool(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) and torch.equal(a.isnan(), b.isnan()))
        return torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray) and not a.dtype.hasobject:
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    try:
        return bool(a == b)
    except ours(RuntimeError, TypeError, ValueError):  # tables and the like compare element-wise
        return repr(a) == repr(b)


def one_memory(batch: Any, other: Any) -> bool:
    """Return whether two batches have something in common that can be written: an object, or memory."""
    if isinstance(batch, Tensor) and isinstance(other, Tensor):
        return batch is other or _one_storage(batch, other)
    if isinstance(batch, np.ndarray) and isinstance(other, np.ndarray):
        return batch is other or bool(np.may_share_memory(batch, other))
    if isinstance(batch, _UNWRITTEN) or callable(batch):
        return False
    if batch is other and not isinstance(batch, tuple):
        return True
    left, right = _entries(batch), _entries(other)
    return len(left) == len(right) and any(one_memory(one, another) for one, another in zip(left, right, strict=True))


_UNWRITTEN = (
    *(int, float, complex, str, bytes, type(None), range, slice, frozenset, enum.Enum, PurePath, np.generic),
    *(torch.dtype, torch.device, torch.Size, datetime.date, datetime.time, datetime.timedelta),
)


def _one_storage(tensor: Tensor, other: Tensor) -> bool:
    try:
        address = tensor.untyped_storage().data_ptr()
        return bool(address) and address == other.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # it has none, as a sparse one
        return False


def _entries(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, tuple | list):
        return list(batch)
    if is_dataclass(batch):
        return [getattr(batch, each.name) for each in dataclasses.fields(batch) if hasattr(batch, each.name)]
    return []
