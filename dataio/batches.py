"""Look into a batch of any structure: its tensors, its size, its signature."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import enum
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from accel.profiler.interruptions import ours


def leaves(batch: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(batch, Tensor | str | bytes):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from leaves(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):  # one with init=False may be set later
                yield from leaves(getattr(batch, field.name))
    else:
        yield batch


def tensors(batch: Any) -> list[Tensor]:
    """Return the tensors in `batch`, in order."""
    return [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Return `batch` with `function` applied to each tensor; the structure and its types stay.

    Named tuples, mappings that can be copied and dataclasses keep their class. One in which no tensor
    changed is returned as the very same object.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return _rebuild_mapping(batch, {key: map_tensors(function, value) for key, value in batch.items()})
    if isinstance(batch, tuple | list):
        values = [map_tensors(function, value) for value in batch]
        if isinstance(batch, PackedSequence):
            values[1] = batch.batch_sizes  # which stay on the CPU
        return with_entries(batch, values)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return _rebuild_dataclass(function, batch)
    return batch


def with_entries(sequence: Any, entries: list[Any]) -> Any:
    """Return a tuple or list of the same class with other entries; the very same object where none is another."""
    if all(new is old for new, old in zip(entries, sequence, strict=True)):
        return sequence
    return type(sequence)(*entries) if hasattr(sequence, "_fields") else type(sequence)(entries)


def fields_of(instance: Any) -> dict[str, Any]:
    """Return what stands in a dataclass, in its fields and in attributes beside them."""
    names = dict.fromkeys([*(each.name for each in dataclasses.fields(instance)), *getattr(instance, "__dict__", ())])
    return {name: getattr(instance, name) for name in names if hasattr(instance, name)}


def _rebuild_mapping(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if all(values[key] is batch[key] for key in batch):
        return batch
    if type(batch) is dict:
        return values
    try:
        changed: Any = copy.copy(batch)
        for key, value in values.items():
            changed[key] = value
    except TypeError:  # one that can't be copied, or written to
        return type(batch)(values)  # type: ignore[call-arg]
    return changed


def _rebuild_dataclass(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    old = fields_of(batch)
    new = {name: map_tensors(function, value) for name, value in old.items()}
    changed = {name: value for name, value in new.items() if value is not old[name]}
    if not changed:
        return batch
    rebuilt = copy.copy(batch)  # not made anew: what __post_init__ did is done
    for name, value in changed.items():
        object.__setattr__(rebuilt, name, value)  # of a frozen one too
    return rebuilt


def describe(batch: Any) -> tuple[int, Hashable]:
    """Return the number of samples, 0 if unknown, and what two batches of the same kind share: their tensors' shapes.

    The number of samples is the first dimension of the first tensor that has one. Called for every batch: 2 µs for a
    pair of tensors.
    """
    if type(batch) in (tuple, list):
        # Not by a call for each: it takes as long again.
        shapes = [shape_of(leaf) if leaf.is_nested else leaf.shape for leaf in batch if type(leaf) is Tensor]
        if len(shapes) != len(batch):
            shapes = [shape_of(tensor) for tensor in tensors(batch)]
    else:
        shapes = [shape_of(tensor) for tensor in tensors(batch)]
    return next((shape[0] for shape in shapes if shape), 0), tuple(shapes)


def shape_of(tensor: Tensor) -> torch.Size:
    """Return a tensor's shape; of a nested one, which has none, how many it holds and how many elements these have."""
    return torch.Size((tensor.size(0), tensor.numel())) if tensor.is_nested else tensor.shape


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
    try:
        return bool(a == b)
    except ours(RuntimeError, TypeError, ValueError):  # numpy arrays and the like compare element-wise
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
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, each.name) for each in dataclasses.fields(batch) if hasattr(batch, each.name)]
    return []
