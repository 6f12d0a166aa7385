"""Turn a batch into a message and a piece of shared memory, and back.

Tensors and numeric numpy arrays, wherever they lie in the batch, go through the shared memory; the rest is pickled.
What can't lie there as plain bytes (sparse, quantised, subclasses, arrays of objects) is pickled too.

| part | holds |
|---|---|
| payload | the pickled structure, with a number in place of each array |
| places | for each array: kind, offset in bytes, dtype, shape, stride |
| memory | the bytes |
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_ALIGN = 64
_DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
        # These torch can't unpickle at all.
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
        torch.complex32,
    }
)


class Place(NamedTuple):
    """Where in the memory an array lies."""

    kind: str
    offset: int
    nbytes: int
    dtype: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Packed(NamedTuple):
    """A batch, ready to be written: its message, and its arrays with their places."""

    payload: bytes
    places: list[Place]
    arrays: list[Tensor]
    size: int


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.places: list[Place] = []
        self.arrays: list[Tensor] = []
        self.size = 0
        # The object itself is kept beside its number, so that no other can get its id meanwhile.
        self._seen: dict[int, tuple[int, Any]] = {}

    def persistent_id(self, thing: Any) -> int | None:
        if type(thing) is Tensor:
            return self._add("tensor", thing, thing) if _plain(thing) else None
        if type(thing) is np.ndarray:
            flat = _bytes_of(thing)
            return None if flat is None else self._add("fortran" if _fortran(thing) else "array", thing, flat)
        return None

    def _add(self, kind: str, thing: Any, array: Tensor) -> int:
        if id(thing) in self._seen:
            return self._seen[id(thing)][0]
        number = len(self.places)
        self._seen[id(thing)] = (number, thing)
        if kind == "tensor":
            array = array.detach()
            if not dense(array):
                array = array.contiguous()
            described = (array.dtype, tuple(array.shape), tuple(array.stride()))
        else:
            described = (thing.dtype.str, thing.shape, ())
        nbytes = array.numel() * array.element_size()
        self.places.append(Place(kind, self.size, nbytes, *described))
        self.arrays.append(array)
        self.size = -(-(self.size + nbytes) // _ALIGN) * _ALIGN
        return number


def _plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.dtype in _DTYPES
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.__dict__  # attributes of its own travel by pickle
    )


def _bytes_of(array: np.ndarray[Any, Any]) -> Tensor | None:
    if array.dtype.hasobject or array.dtype.names is not None or array.dtype.kind not in "biufc":
        return None
    raw = np.ascontiguousarray(array.T if _fortran(array) else array).reshape(-1).view(np.uint8)
    if not raw.flags.writeable:
        raw = raw.copy()  # torch warns of memory that may not be written
    return torch.from_numpy(raw)


def _fortran(array: np.ndarray[Any, Any]) -> bool:
    return array.flags.f_contiguous and not array.flags.c_contiguous


def dense(tensor: Tensor) -> bool:
    """Tell whether the elements fill one stretch of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def pack(batch: Any) -> Packed:
    """Return `batch` ready to be written; raises what pickle raises for a thing that can't travel."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(batch)
    return Packed(file.getvalue(), pickler.places, pickler.arrays, pickler.size)


def write(packed: Packed, memory: Any) -> None:
    """Copy the arrays to their places in `memory`, a writable buffer of at least `packed.size` bytes."""
    for place, array in zip(packed.places, packed.arrays, strict=True):
        if place.nbytes:
            target = torch.frombuffer(memory, dtype=array.dtype, count=array.numel(), offset=place.offset)
            # as_strided keeps the order of dimensions, channels_last say, on both sides.
            target.as_strided(array.shape, array.stride()).copy_(array)


def load(payload: bytes, places: list[Place], memory: memoryview | bytearray | None) -> Any:
    """Return the batch; its tensors lie in `memory` and keep it alive."""
    unpickler = pickle.Unpickler(io.BytesIO(payload))
    arrays: dict[int, Any] = {}

    def array(number: int) -> Any:
        if number not in arrays:
            arrays[number] = _view(places[number], memory)
        return arrays[number]

    unpickler.persistent_load = array  # type: ignore[method-assign]
    return unpickler.load()


def _view(place: Place, memory: Any) -> Any:
    make = _VIEWS[place.kind]
    return make(place, memory)


def _tensor(place: Place, memory: Any) -> Tensor:
    if not place.nbytes:
        return torch.empty_strided(place.shape, place.stride, dtype=place.dtype)
    count = place.nbytes // place.dtype.itemsize
    flat = torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.offset)
    return flat.as_strided(place.shape, place.stride)


def _array(place: Place, memory: Any) -> np.ndarray[Any, Any]:
    dtype = np.dtype(place.dtype)
    if not place.nbytes:
        return np.empty(place.shape, dtype)
    # By way of torch: an array made by numpy from a memoryview would not keep that very view alive.
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=place.nbytes, offset=place.offset)
    array: np.ndarray[Any, Any] = flat.numpy().view(dtype)
    return array.reshape(place.shape)


def _fortran_array(place: Place, memory: Any) -> np.ndarray[Any, Any]:
    return _array(place._replace(shape=place.shape[::-1]), memory).T


_VIEWS: dict[str, Callable[[Place, Any], Any]] = {"tensor": _tensor, "array": _array, "fortran": _fortran_array}
