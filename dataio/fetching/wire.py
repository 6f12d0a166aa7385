"""Turn a batch into a message and a piece of shared memory, and back: pickle with its buffers out of band.

Tensors and contiguous numpy arrays, wherever they lie in the batch, go through the shared memory;
the rest is pickled. Tensors of one memory, half of which each fills, are of one memory again. What
can't lie there as plain bytes (sparse, quantised, subclasses, arrays of objects) is pickled too.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from accel.profiler.errors import InvalidType

_ALIGN = 64
# A tensor that is a larger part of its memory than this travels with the whole of it.
_LEAST_SHARE = 0.5


class WireBatch(NamedTuple):
    """A batch, ready to be written: its message, and what is written in a row, each piece aligned."""

    payload: bytes
    pieces: list[memoryview]
    size: int

    @property
    def sizes(self) -> list[int]:
        return [piece.nbytes for piece in self.pieces]


class _Memory:
    """The memory of a tensor; an object of its own, so that several tensors in it share one piece."""

    def __init__(self, owner: Tensor, address: int, size: int) -> None:
        raw: Any = (ctypes.c_uint8 * size).from_address(address)
        raw.owner = owner  # which lives as long as any buffer of this
        self._raw = raw

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _storage, (pickle.PickleBuffer(self._raw),)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, pieces: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, protocol=5, buffer_callback=pieces.append)
        self._memories: dict[int, _Memory] = {}

    def reducer_override(self, thing: Any) -> Any:
        kind = type(thing)
        if kind is np.ndarray and not (thing.flags.c_contiguous or thing.flags.f_contiguous or thing.dtype.hasobject):
            return np.ascontiguousarray(thing).__reduce_ex__(5)
        if not isinstance(thing, Tensor):
            return NotImplemented
        if thing.requires_grad and not thing.is_leaf:
            raise InvalidType(
                "a tensor that hangs on a graph can't be sent to another process, where it would be a leaf that "
                f"teaches nothing. Found: grad_fn={thing.grad_fn!r}; compute it in the loop, or detach it"
            )
        return self._reduced(thing) if kind is Tensor and _plain(thing) else NotImplemented

    def _reduced(self, tensor: Tensor) -> tuple[Any, ...]:
        storage, own = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
        if not own:
            return _tensor, (None, tensor.dtype, 0, tuple(tensor.shape), tensor.stride())
        if own < _LEAST_SHARE * storage.nbytes():
            tensor = tensor.clone()
            storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._memories:
            self._memories[address] = _Memory(tensor, address, storage.nbytes())
        placed = (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        return _tensor, (self._memories[address], *placed)


def _plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.__dict__  # attributes of its own travel by pickle
    )


def _storage(buffer: Any) -> torch.UntypedStorage:
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _tensor(
    storage: torch.UntypedStorage | None, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: Any
) -> Tensor:
    if storage is None:
        return torch.empty_strided(shape, stride, dtype=dtype)
    # Not a view of another one, which could not be detached in place.
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


def pack(batch: Any) -> WireBatch:
    """Return `batch` ready to be written; raises what pickle raises for a thing that can't travel."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(file, buffers).dump(batch)
    pieces = [buffer.raw() for buffer in buffers]
    return WireBatch(file.getvalue(), pieces, _places([piece.nbytes for piece in pieces])[-1])


def _places(sizes: list[int]) -> list[int]:
    return [0, *accumulate(-(-size // _ALIGN) * _ALIGN for size in sizes)]


def write(packed: WireBatch, memory: Any) -> None:
    """Copy the pieces to their places in `memory`, a writable buffer of at least `packed.size` bytes."""
    whole = memoryview(memory).cast("B")
    for piece, begin in zip(packed.pieces, _places(packed.sizes), strict=False):
        whole[begin : begin + piece.nbytes] = piece


def load(payload: bytes, sizes: list[int], memory: Any) -> Any:
    """Return the batch; its tensors and arrays lie in `memory`, and keep what that is of alive."""
    if not sizes:
        return pickle.loads(payload)
    whole = memoryview(bytearray() if memory is None else memory).cast("B")
    return pickle.loads(payload, buffers=[whole[b : b + size] for b, size in zip(_places(sizes), sizes, strict=False)])
