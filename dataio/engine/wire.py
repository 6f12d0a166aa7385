"""Turn a batch into a message and a piece of shared memory, and back.

Tensors and numeric numpy arrays, wherever they lie in the batch, go through the shared memory; the rest is pickled.
Views of one memory that lie over each other are views of one memory again.
What can't lie there as plain bytes (sparse, quantised, subclasses, arrays of objects) is pickled too.

| part | holds |
|---|---|
| payload | the pickled structure, with a number in place of each array |
| places | for each array: kind, offset in bytes, dtype, shape, stride |
| memory | the bytes |
"""

from __future__ import annotations

import ctypes
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


class ArrayPlace(NamedTuple):
    """Where in the memory an array lies."""

    kind: str
    offset: int
    nbytes: int
    dtype: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class WirePiece(NamedTuple):
    """What is written at one place of the memory: a dense tensor."""

    offset: int
    array: Tensor


class WireBatch(NamedTuple):
    """A batch, ready to be written: its message, the places of its arrays, and what to write where."""

    payload: bytes
    places: list[ArrayPlace]
    pieces: list[WirePiece]
    size: int


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.arrays: list[Any] = []
        # The object itself is kept beside its number, so that no other can get its id meanwhile.
        self._seen: dict[int, tuple[int, Any]] = {}

    def persistent_id(self, thing: Any) -> int | None:
        if isinstance(thing, Tensor) and thing.requires_grad and not thing.is_leaf:
            raise TypeError(
                "a tensor that hangs on a graph can't be sent to another process, where it would be a leaf that "
                f"teaches nothing. Found: grad_fn={thing.grad_fn!r}; compute it in the loop, or detach it"
            )
        if type(thing) is Tensor:
            return self._add(thing) if _plain(thing) else None
        if type(thing) is np.ndarray:
            return self._add(thing) if _numeric(thing) else None
        return None

    def _add(self, thing: Any) -> int:
        if id(thing) in self._seen:
            return self._seen[id(thing)][0]
        number = len(self.arrays)
        self._seen[id(thing)] = (number, thing)
        self.arrays.append(thing)
        return number


class _Layout:
    """Finds places for arrays; those that lie over each other here do so there."""

    def __init__(self, arrays: list[Any]) -> None:
        self.places: list[ArrayPlace] = [_NOWHERE] * len(arrays)
        self.pieces: list[WirePiece] = []
        self.size = 0
        for group in _overlapping(arrays):
            things = {number: arrays[number] for number in group}
            if len(group) > 1 and _together(list(things.values())):
                self._shared(things)
            else:
                for number, thing in things.items():
                    self._alone(number, thing)

    def _alone(self, number: int, thing: Any) -> None:
        if isinstance(thing, Tensor):
            array = thing.detach()
            array = array if dense(array) else array.contiguous()
            place = ArrayPlace("tensor", 0, _nbytes(array), array.dtype, tuple(array.shape), tuple(array.stride()))
        else:
            array = _bytes_of(thing)
            kind = "fortran" if _fortran(thing) else "array"
            place = ArrayPlace(kind, 0, _nbytes(array), thing.dtype.str, thing.shape, ())
        self.places[number] = place._replace(offset=self._take(array))

    def _shared(self, group: dict[int, Any]) -> None:
        spans = {number: _span(thing) for number, thing in group.items()}
        low, high = min(low for low, _ in spans.values()), max(high for _, high in spans.values())
        raw = (ctypes.c_uint8 * (high - low)).from_address(low)
        # Aligned there as it is here.
        offset = self._take(torch.frombuffer(raw, dtype=torch.uint8), low % _ALIGN)
        for number, thing in group.items():
            at, nbytes = offset + _address(thing) - low, spans[number][1] - spans[number][0]
            if isinstance(thing, Tensor):
                place = ArrayPlace("tensor", at, nbytes, thing.dtype, tuple(thing.shape), tuple(thing.stride()))
            else:
                place = ArrayPlace("view", at, nbytes, thing.dtype.str, thing.shape, thing.strides)
            self.places[number] = place

    def _take(self, array: Tensor, beyond: int = 0) -> int:
        offset, nbytes = self.size + beyond, _nbytes(array)
        if nbytes:
            self.pieces.append(WirePiece(offset, array))
            self.size = -(-(offset + nbytes) // _ALIGN) * _ALIGN
        return offset if nbytes else self.size


_NOWHERE = ArrayPlace("", 0, 0, None, (), ())


def _nbytes(array: Tensor) -> int:
    return array.numel() * array.element_size()


def _overlapping(arrays: list[Any]) -> list[list[int]]:
    """Return the numbers of the arrays, those together that lie over each other in memory."""
    spans = [_span(thing) for thing in arrays]
    groups: list[list[int]] = []
    end = 0
    for number in sorted(range(len(arrays)), key=lambda number: spans[number]):
        low, high = spans[number]
        # An empty array lies nowhere.
        if low < min(end, high):
            groups[-1].append(number)
        else:
            groups.append([number])
        end = max(end, high)
    return sorted((sorted(group) for group in groups), key=lambda group: group[0])


def _together(things: list[Any]) -> bool:
    """Return whether arrays whose stretches of memory lie over each other are to be sent as one stretch.

    Columns of a wide table have no element in common, and lie far apart: the table is not to be sent for them.
    """
    spans = [_span(thing) for thing in things]
    stretch = max(high for _, high in spans) - min(low for low, _ in spans)
    if stretch <= 4 * sum(_size(thing) for thing in things):
        return True
    return any(_share(array, other) for place, array in enumerate(things) for other in things[:place])


def _size(thing: Any) -> int:
    return _nbytes(thing) if isinstance(thing, Tensor) else int(thing.nbytes)


def _share(array: Any, other: Any) -> bool:
    try:
        return bool(np.shares_memory(_bare(array), _bare(other), max_work=10_000))
    except np.exceptions.TooHardError:
        return True


def _bare(thing: Any) -> np.ndarray[Any, Any]:
    """Return an array over a thing's memory, whatever its dtype."""
    if isinstance(thing, np.ndarray):
        return thing
    low, high = _span(thing)
    raw = (ctypes.c_uint8 * (high - low)).from_address(low)
    strides = [stride * thing.element_size() for stride in thing.stride()]
    return np.ndarray(tuple(thing.shape), f"V{thing.element_size()}", memoryview(raw), 0, strides)


def _address(thing: Any) -> int:
    return int(thing.data_ptr() if isinstance(thing, Tensor) else thing.__array_interface__["data"][0])


def _span(thing: Any) -> tuple[int, int]:
    """Return the addresses of the first byte of an array and of the one after its last."""
    if isinstance(thing, Tensor):
        strides, size = [stride * thing.element_size() for stride in thing.stride()], thing.element_size()
    else:
        strides, size = list(thing.strides), thing.itemsize
    address = _address(thing)
    if 0 in thing.shape:
        return address, address
    reach = [(length - 1) * stride for length, stride in zip(thing.shape, strides, strict=True)]
    below, above = sum(step for step in reach if step < 0), sum(step for step in reach if step > 0)
    return address + below, address + above + size


def _plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and tensor.dtype in _DTYPES
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.__dict__  # attributes of its own travel by pickle
    )


def _numeric(array: np.ndarray[Any, Any]) -> bool:
    return not array.dtype.hasobject and array.dtype.names is None and array.dtype.kind in "biufc"


def _bytes_of(array: np.ndarray[Any, Any]) -> Tensor:
    raw = np.ascontiguousarray(array.T if _fortran(array) else array).reshape(-1).view(np.uint8)
    if not raw.flags.writeable:
        raw = raw.copy()  # torch warns of memory that may not be written
    return torch.from_numpy(raw)


def _fortran(array: np.ndarray[Any, Any]) -> bool:
    return array.flags.f_contiguous and not array.flags.c_contiguous


def dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one stretch of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def pack(batch: Any) -> WireBatch:
    """Return `batch` ready to be written; raises what pickle raises for a thing that can't travel."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(batch)
    layout = _Layout(pickler.arrays)
    return WireBatch(file.getvalue(), layout.places, layout.pieces, layout.size)


def write(packed: WireBatch, memory: Any) -> None:
    """Copy the arrays to their places in `memory`, a writable buffer of at least `packed.size` bytes."""
    for offset, array in packed.pieces:
        target = torch.frombuffer(memory, dtype=array.dtype, count=array.numel(), offset=offset)
        # as_strided keeps the order of dimensions, channels_last say, on both sides.
        target.as_strided(array.shape, array.stride()).copy_(array)


def load(payload: bytes, places: list[ArrayPlace], memory: memoryview | bytearray | None) -> Any:
    """Return the batch; its tensors lie in `memory` and keep it alive."""
    unpickler = pickle.Unpickler(io.BytesIO(payload))
    arrays: dict[int, Any] = {}

    def array(number: int) -> Any:
        if number not in arrays:
            arrays[number] = _view(places[number], memory)
        return arrays[number]

    unpickler.persistent_load = array  # type: ignore[method-assign]
    return unpickler.load()


def _view(place: ArrayPlace, memory: Any) -> Any:
    make = _VIEWS[place.kind]
    return make(place, memory)


def _tensor(place: ArrayPlace, memory: Any) -> Tensor:
    if not place.nbytes:
        return torch.empty_strided(place.shape, place.stride, dtype=place.dtype)
    count = place.nbytes // place.dtype.itemsize
    flat = torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.offset)
    # Not a view of it, which could not be detached in place.
    return torch.empty(0, dtype=place.dtype).set_(flat.untyped_storage(), 0, place.shape, place.stride)


def _array(place: ArrayPlace, memory: Any) -> np.ndarray[Any, Any]:
    dtype = np.dtype(place.dtype)
    if not place.nbytes:
        return np.empty(place.shape, dtype)
    # By way of torch: an array made by numpy from a memoryview would not keep that very view alive.
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=place.nbytes, offset=place.offset)
    array: np.ndarray[Any, Any] = flat.numpy().view(dtype)
    return array.reshape(place.shape)


def _array_view(place: ArrayPlace, memory: Any) -> np.ndarray[Any, Any]:
    dtype = np.dtype(place.dtype)
    below = -sum((size - 1) * stride for size, stride in zip(place.shape, place.stride, strict=True) if stride < 0)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=place.nbytes, offset=place.offset - below).numpy()
    return np.ndarray(place.shape, dtype, flat, below, place.stride)


def _fortran_array(place: ArrayPlace, memory: Any) -> np.ndarray[Any, Any]:
    return _array(place._replace(shape=place.shape[::-1]), memory).T


_VIEWS: dict[str, Callable[[ArrayPlace, Any], Any]] = {
    "tensor": _tensor,
    "array": _array,
    "fortran": _fortran_array,
    "view": _array_view,
}
