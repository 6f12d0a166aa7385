"""A number for what a big container or array holds, so that a change in place is seen; up to so much in all."""

from __future__ import annotations

import ctypes
import marshal
import sys
import zlib
from collections.abc import Iterable
from itertools import islice
from multiprocessing.sharedctypes import SynchronizedBase
from multiprocessing.synchronize import Event
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

C_DATA: type = ctypes.Structure.__mro__[1]
"""Base of all classes of ctypes whose instances hold memory."""
# Together 30 to 100 ms, once in an epoch: about what starting a worker anew takes.
MOST_BYTES = 64 << 20
MOST_ENTRIES = 1 << 20
_CHUNK, _CHUNK_BYTES = 4096, 1 << 20
_SMALL_BYTES = 1 << 16
_SLOW = 8
"""Entries that a path or a tensor counts for."""


class Content:
    """Takes the digests of one look at a dataset.

    Args:
        share: of `MOST_BYTES` and `MOST_ENTRIES` that it may look at.

    Attributes:
        whole: False once something could not be looked into, or was too much.
    """

    def __init__(self, share: float = 1.0) -> None:
        self.whole = True
        self._bytes, self._entries = int(MOST_BYTES * share), int(MOST_ENTRIES * share)
        self._written_bytes = 2 * self._bytes  # of entries: a million file names

    def unseen(self) -> None:
        """Record something that can't be looked into."""
        self.whole = False

    def of_entries(self, entries: Iterable[Any], count: int) -> int:
        """Return a digest of numbers, texts, paths, tensors, lists, tuples and dicts of such; 0 of anything else."""
        if count > self._entries:
            self.unseen()
            return 0
        self._entries -= count
        digest, left, most = 0, iter(entries), 1
        try:
            while chunk := list(islice(left, most)):
                written = self._written(chunk)
                digest = zlib.crc32(written, digest)
                # The first ones show how large the others may be: they are copied to be looked at.
                most = max(1, min(_CHUNK, 8 * most, len(chunk) * _CHUNK_BYTES // len(written)))
        except ValueError:
            self.unseen()
        return digest

    def _written(self, chunk: list[Any]) -> bytes:
        """Write entries as bytes; version 2 writes equal things equally, whatever else refers to them."""
        try:
            written = marshal.dumps(chunk, 2)
        except ValueError:
            # Paths and tensors take eight times as long.
            if (_SLOW - 1) * len(chunk) > self._entries:
                raise
            self._entries -= (_SLOW - 1) * len(chunk)
            written = marshal.dumps(self._plain(chunk), 2)
        if len(written) > self._written_bytes:
            raise ValueError("too many bytes")
        self._written_bytes -= len(written)
        return written

    def _plain(self, value: Any) -> Any:
        """Return a value with its paths as texts and its tensors as bytes, in a form that no other value has."""
        if isinstance(value, PurePath):
            return b"path", str(value)
        if type(value) in (list, tuple):
            return type(value)(map(self._plain, value))
        if type(value) is dict:
            return {self._plain(key): self._plain(each) for key, each in value.items()}
        if type(value) is Tensor and value.layout == torch.strided and value.device.type == "cpu":
            if not self._afford(value.numel() * value.element_size()):
                raise ValueError("too many bytes")
            return b"tensor", str(value.dtype), tuple(value.shape), bytes_of(value)
        return value

    def of_array(self, array: np.ndarray[Any, Any]) -> int:
        """Return a digest of an array; 0 of one that can't be written, or that lies in a file."""
        if isinstance(array, np.memmap):
            if array.mode != "r":
                self.unseen()
            return 0
        if array.dtype.hasobject:
            return self.of_entries(array.ravel().tolist(), array.size)
        if not writeable(array) or not self._afford(array.nbytes):
            return 0
        return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def of_tensor(self, tensor: Tensor) -> int:
        """Return a digest of a tensor that is small or may be written past its version counter; 0 of others.

        One in shared memory is none of these: what is written there reaches the workers.
        """
        plain = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.is_nested or tensor.is_shared():  # type: ignore[no-untyped-call]
            return 0
        size = tensor.numel() * tensor.element_size()
        # Memory that came from an array, or was given out as one, can't be resized.
        if not tensor.is_inference() and tensor.untyped_storage().resizable() and size > _SMALL_BYTES:
            return 0
        return zlib.crc32(bytes_of(tensor)) if self._afford(size) else 0

    def of_memory(self, data: Any) -> int:
        """Return a digest of an instance of a ctypes class: its own memory, not what it may point to."""
        view = memoryview(data)
        return zlib.crc32(view.tobytes()) if self._afford(view.nbytes) else 0

    def of_shared(self, thing: Any) -> Any:
        """Return a digest of what a thing of multiprocessing's shows to all processes; None if it shows nothing.

        Workers see it change at once; what was made before the loop changed it is stale all the same.
        """
        if isinstance(thing, SynchronizedBase):
            thing = thing.get_obj()
        if isinstance(thing, C_DATA):
            return self.of_memory(thing)
        if isinstance(thing, Event):
            return thing.is_set()
        managers = sys.modules.get("multiprocessing.managers")
        if managers is not None and isinstance(thing, managers.BaseProxy):
            self.unseen()  # it lies in another process
        return None

    def of_bytes(self, thing: bytearray) -> int:
        """Return a digest of bytes."""
        return zlib.crc32(thing) if self._afford(len(thing)) else 0

    def _afford(self, size: int) -> bool:
        if size > self._bytes:  # what is smaller may still be looked at
            self.unseen()
            return False
        self._bytes -= size
        return True


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
