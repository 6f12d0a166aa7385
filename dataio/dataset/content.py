"""Digests of what a big container, an array or a tensor holds, by which a change in place is seen."""

from __future__ import annotations

import ctypes
import marshal
import sys
import zlib
from collections.abc import Iterable
from itertools import islice
from multiprocessing.sharedctypes import SynchronizedBase
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel.profiler.errors import InvalidArgument

C_DATA: type = ctypes.Structure.__mro__[1]
"""Base of all classes of ctypes whose instances hold memory."""
_CHUNK, _CHUNK_BYTES = 4096, 1 << 20
# Paths and tensors take eight times as long as numbers and texts.
_SLOW = 8


def digest_of_entries(entries: Iterable[Any], most_bytes: float) -> int:
    """Return a digest of numbers, texts, paths, tensors, and lists, tuples and dicts of such.

    Raises:
        InvalidArgument: if something else is among them, or if they take more than `most_bytes`, those of paths and
            tensors counted eight times.
    """
    digest, left, most = 0, iter(entries), 1
    while chunk := list(islice(left, most)):
        written, cost = _written(chunk)
        most_bytes -= cost * len(written)
        if most_bytes < 0:
            raise InvalidArgument("too many bytes")
        digest = zlib.crc32(written, digest)
        # The first ones show how large the others may be: they are copied to be looked at.
        most = max(1, min(_CHUNK, 8 * most, len(chunk) * _CHUNK_BYTES // len(written)))
    return digest


def _written(chunk: list[Any]) -> tuple[bytes, int]:
    """Write entries as bytes, and tell what one costs; version 2 writes equal things equally."""
    try:
        return marshal.dumps(chunk, 2), 1
    except ValueError:
        return marshal.dumps([_plain(each) for each in chunk], 2), _SLOW


def _plain(value: Any) -> Any:
    """Return a value with its paths as texts and its tensors as bytes, in a form that no other value has."""
    if isinstance(value, PurePath):
        return b"path", str(value)
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if type(value) is dict:
        return {_plain(key): _plain(each) for key, each in value.items()}
    if type(value) is Tensor and value.layout == torch.strided and value.device.type == "cpu":
        return b"tensor", str(value.dtype), tuple(value.shape), bytes_of(value)
    return value


def digest_of_array(array: np.ndarray[Any, Any]) -> int:
    """Return a digest of the bytes of an array."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def digest_of_tensor(tensor: Tensor) -> int:
    """Return a digest of the bytes of a tensor on the CPU."""
    return zlib.crc32(bytes_of(tensor))


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor on the CPU; not by way of an array, or its memory couldn't be resized any more."""
    dense = tensor.detach().contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.numel() * dense.element_size())


def writeable(array: np.ndarray[Any, Any]) -> bool:
    """Return whether an array, or one that it is a view of, can be written."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return True
        owner = owner.base
    return owner is not None and not isinstance(owner, bytes)


def memory_of(thing: Any) -> Any:
    """Return what holds the memory of a ctypes instance, also of multiprocessing's; None for anything else."""
    if isinstance(thing, SynchronizedBase):
        thing = thing.get_obj()
    return thing if isinstance(thing, bytearray | C_DATA) else None


def lies_elsewhere(thing: Any) -> bool:
    """Return whether a thing stands for one in another process, of a `multiprocessing.Manager`."""
    managers = sys.modules.get("multiprocessing.managers")
    return managers is not None and isinstance(thing, managers.BaseProxy)
