"""Samples as bytes, and the memory that they lie in, which processes share that are forked after it was made.

All samples that are kept have one layout, taken from the first: a structure of tensors, arrays,
numbers and texts. What has another one (a tensor of another shape, a longer list) is not kept, and
fetched as ever. A sample made from bytes has memory of its own, and is what was packed in all that
a collate function or a model can tell: types, shapes, strides, bits.

Each sample has its place, by its index, so that nothing is allocated or locked when one is written:
whoever writes it writes the same bytes. A place costs memory once it is written. What each place
holds is said by its state, which is written last.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel.profiler.errors import InvalidArgument

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Places = np.ndarray[tuple[int], np.dtype[np.int64]]
UNKNOWN, SEEN, KEPT = 0, 1, 2
_ALIGNED = 64
_OF_NUMPY = (
    *(torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    torch.bool,
)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NotKept(InvalidArgument):
    """Samples of this kind can't be kept; the message says of which."""


class Leaf(ABC):
    """One value of a sample; `size` is its bytes, the same for each sample."""

    size: int

    @abstractmethod
    def rows(self, values: Sequence[Any]) -> Bytes | None:
        """Return a row of `size` bytes for each of some values; None if one is of another kind than this one."""

    @abstractmethod
    def unpack(self, packed: Bytes, share: bool) -> Sequence[Any]:
        """Return the values of some samples, from memory of nobody else's; they may `share` it, or each has its own."""


class _DenseLeaf(Leaf):
    """An array without gaps, whatever the order of its dimensions in memory."""

    def __init__(self, array: np.ndarray[Any, Any], what: str) -> None:
        self.dtype, self._shape, self._strides = array.dtype, array.shape, array.strides
        self._order = _memory_order(self._strides)
        in_memory = array.transpose(self._order)
        self.size, self._rows = array.nbytes, in_memory.shape
        self._inverse = None if self._order == sorted(self._order) else [*np.argsort(self._order).tolist()]
        again = in_memory if self._inverse is None else in_memory.transpose(self._inverse)
        if not in_memory.flags.c_contiguous or again.strides != self._strides:
            raise NotKept(f"{what} with gaps between its elements")

    def rows(self, values: Sequence[Any]) -> Bytes | None:
        # Not by `torch.stack`: waking its threads takes longer than copying small samples.
        packed = np.empty((len(values), *self._rows), self.dtype)
        for place, value in enumerate(values):
            array = self._array(value)
            if array is None or array.shape != self._shape or array.strides != self._strides:
                return None
            packed[place] = array if self._inverse is None else array.transpose(self._order)
        return packed.reshape(len(values), -1).view(np.uint8)

    @abstractmethod
    def _array(self, value: Any) -> np.ndarray[Any, Any] | None:
        """Return a value as an array; None if it is of another kind."""


class _TensorLeaf(_DenseLeaf):
    def __init__(self, example: Tensor) -> None:
        plain = example.layout == torch.strided and example.device.type == "cpu" and not example.is_quantized
        if not plain or example.is_complex() or example.requires_grad or not example.numel() or example.__dict__:
            raise NotKept("a tensor that is not plain memory of the CPU")
        if example.is_neg() or example._is_zerotensor():
            raise NotKept("a tensor that shows other numbers than its memory holds, as `x.conj().imag`; clone it")
        self._torch_dtype = example.dtype
        self._bits = None if example.dtype in _OF_NUMPY else _BITS[example.element_size()]
        super().__init__(self._shown(example), "a tensor")

    def _shown(self, value: Tensor) -> np.ndarray[Any, Any]:  # raises for what only shows its numbers negated
        return value.numpy() if self._bits is None else value.view(self._bits).numpy()

    def _array(self, value: Any) -> np.ndarray[Any, Any] | None:
        if (
            type(value) is not Tensor or value.dtype is not self._torch_dtype or value.__dict__
        ):  # attributes are not kept
            return None
        try:
            return self._shown(value)  # attributes of an array take half as long to read
        except (RuntimeError, TypeError):  # it requires a gradient, or is elsewhere
            return None

    def unpack(self, packed: Bytes, share: bool) -> Sequence[Any]:
        rows = torch.from_numpy(packed).view(self._torch_dtype).view(-1, *self._rows).unbind(0)
        own = rows if share else [row.clone() for row in rows]
        return own if self._inverse is None else [row.permute(self._inverse) for row in own]


class _ArrayLeaf(_DenseLeaf):
    def __init__(self, example: np.ndarray[Any, Any]) -> None:
        if example.dtype.hasobject or not example.flags.writeable or not example.nbytes:
            raise NotKept("an array that is not plain, dense, writeable memory")
        if not example.shape:
            raise NotKept("an array without dimensions, of which numpy makes scalars")
        super().__init__(example, "an array")

    def _array(self, value: Any) -> np.ndarray[Any, Any] | None:
        is_plain = type(value) is np.ndarray and value.dtype == self.dtype and value.flags.writeable
        return value if is_plain else None

    def unpack(self, packed: Bytes, share: bool) -> Sequence[Any]:
        rows = packed.view(self.dtype).reshape(-1, *self._rows)
        own = rows if share else [row.copy() for row in rows]
        return list(own) if self._inverse is None else [row.transpose(self._inverse) for row in own]


class _NumberLeaf(Leaf):
    """A number of Python's or numpy's, or None."""

    def __init__(self, kind: type, dtype: np.dtype[Any]) -> None:
        self._kind, self._dtype, self.size = kind, dtype, dtype.itemsize

    def rows(self, values: Sequence[Any]) -> Bytes | None:
        # numpy's times may be of another unit.
        if not all(
            type(value) is self._kind and getattr(value, "dtype", self._dtype) == self._dtype for value in values
        ):
            return None
        try:
            return np.array(values, self._dtype).reshape(-1, 1).view(np.uint8)
        except OverflowError:  # an int of more bits
            return None

    def unpack(self, packed: Bytes, share: bool) -> Sequence[Any]:
        column = packed.view(self._dtype).reshape(-1)
        if self._kind is type(None):
            return [None] * len(packed)
        return list(column) if issubclass(self._kind, np.generic) else column.tolist()


_PYTHONS = {
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    bool: np.dtype(np.bool_),
    type(None): np.dtype(np.bool_),
}


class _TextLeaf(Leaf):
    """A text, or bytes, up to a length."""

    def __init__(self, example: str | bytes) -> None:
        self._kind, self.size = type(example), max(256, 4 * len(example))

    def rows(self, values: Sequence[Any]) -> Bytes | None:
        if not all(type(value) is self._kind for value in values):
            return None
        try:
            texts = [value.encode() if isinstance(value, str) else value for value in values]
        except UnicodeEncodeError:  # a file name that is no UTF-8
            return None
        if any(len(text) + 4 > self.size for text in texts):
            return None
        packed = [(len(text).to_bytes(4, "little") + text).ljust(self.size, b"\0") for text in texts]
        return np.frombuffer(b"".join(packed), np.uint8).reshape(len(packed), self.size)

    def unpack(self, packed: Bytes, share: bool) -> Sequence[Any]:
        rows = [row.tobytes() for row in packed]
        texts = [row[4 : 4 + int.from_bytes(row[:4], "little")] for row in rows]
        return [text.decode() for text in texts] if self._kind is str else texts


class _Group:
    """A tuple, named tuple, list or dict of leaves and groups."""

    def __init__(self, kind: type, keys: tuple[Any, ...] | None, parts: list[Any]) -> None:
        self._kind, self._keys, self._parts = kind, keys, parts

    def rows(self, values: list[Any], into: list[Bytes]) -> bool:
        """Append the rows of each leaf; return False if the structure of one value is another one."""
        count, keys = len(self._parts), self._keys
        kind: Any = self._kind
        if not all(type(value) is kind and len(value) == count for value in values):
            return False
        if keys is not None and not all(tuple(value) == keys for value in values):
            return False
        for part, key in zip(self._parts, range(count) if keys is None else keys, strict=True):
            column = [value[key] for value in values]
            if isinstance(part, _Group):
                if not part.rows(column, into):
                    return False
            elif (rows := part.rows(column)) is None:
                return False
            else:
                into.append(rows)
        return True

    def build(self, columns: dict[int, Sequence[Any]]) -> list[Any]:
        """Return the values from the values of each leaf, by its `id`."""
        parts = [part.build(columns) if isinstance(part, _Group) else columns[id(part)] for part in self._parts]
        rows = list(zip(*parts, strict=True))
        if self._kind is tuple:
            return rows
        if self._keys is not None:
            return [dict(zip(self._keys, row, strict=True)) for row in rows]
        return [list(row) for row in rows] if self._kind is list else [self._kind._make(row) for row in rows]  # type: ignore[attr-defined]


class SampleLayout:
    """The layout of a sample, and of all that are like it: its values in order, and the bytes of a sample.

    Raises:
        NotKept: if it holds something else than plain tensors, arrays, numbers and texts.

    Example:
        >>> layout = SampleLayout((torch.zeros(2), 7))
        >>> parts = layout.pack((torch.ones(2), 8))
        >>> layout.unpack([np.frombuffer(bytearray(part), np.uint8)[None] for part in parts])
        [(tensor([1., 1.]), 8)]
    """

    def __init__(self, sample: Any) -> None:
        self.leaves: list[Leaf] = []
        # Within a tuple, so that a sample which is one value is no special case.
        self._root = _Group(tuple, None, [self._part(sample)])
        if _holds_twice(sample):
            raise NotKept("the same memory in two places, which a copy would part")
        self.size = sum(leaf.size for leaf in self.leaves)

    def _part(self, value: Any) -> _Group | Leaf:
        kind = type(value)
        if kind in (tuple, list, dict) or (isinstance(value, tuple) and hasattr(kind, "_make")):
            if not value:
                raise NotKept(f"an empty {kind.__name__}")
            values = value.values() if kind is dict else value
            return _Group(kind, tuple(value) if kind is dict else None, [self._part(each) for each in values])
        leaf = _leaf(value)
        self.leaves.append(leaf)
        return leaf

    def pack(self, sample: Any) -> list[bytes] | None:
        """Return the bytes of each leaf; None if the sample has another layout."""
        rows = self.rows([sample])
        return None if rows is None else [row.tobytes() for row in rows]

    def rows(self, samples: Sequence[Any]) -> list[Bytes] | None:
        """Return the bytes of each leaf, a row for each sample; None if one has another layout."""
        rows: list[Bytes] = []
        is_like = self._root.rows([(sample,) for sample in samples], rows) and not any(map(_holds_twice, samples))
        return rows if is_like else None

    def unpack(self, packed: Sequence[Bytes], share: bool = False) -> list[Any]:
        """Return samples from a row of each leaf; their tensors may `share` memory if they are stacked at once."""
        columns = {id(leaf): leaf.unpack(rows, share) for leaf, rows in zip(self.leaves, packed, strict=True)}
        return [sample for (sample,) in self._root.build(columns)]


def _leaf(value: Any) -> Leaf:
    kind = type(value)
    if kind is Tensor:
        return _TensorLeaf(value)
    if kind is np.ndarray:
        return _ArrayLeaf(value)
    if kind in _PYTHONS:
        return _NumberLeaf(kind, _PYTHONS[kind])
    if isinstance(value, np.generic) and value.dtype.kind in "biufMm":
        return _NumberLeaf(kind, value.dtype)
    if kind in (str, bytes):
        return _TextLeaf(value)
    raise NotKept(f"a {kind.__module__}.{kind.__qualname__}")


def _holds_twice(sample: Any) -> bool:
    """Tell whether a sample of dense leaves holds a list, a dict, or memory of a tensor or an array, in two places."""
    held, spans = list[int](), list[tuple[int, int]]()
    waiting = [sample]
    for value in waiting:
        if type(value) is Tensor:
            spans.append((value.data_ptr(), value.numel() * value.element_size()))
        elif type(value) is np.ndarray:
            spans.append((value.__array_interface__["data"][0], value.nbytes))
        elif isinstance(value, tuple | list | dict):
            held += [] if isinstance(value, tuple) else [id(value)]
            waiting += value.values() if isinstance(value, dict) else value
    overlap = len(spans) > 1 and any(begin + size > after for (begin, size), (after, _) in pairwise(sorted(spans)))
    return overlap or len(held) != len(set(held))


def _memory_order(strides: Sequence[int]) -> list[int]:
    """Return the dimensions from the outermost in memory to the innermost."""
    return sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))


class SampleStore:
    """Places for `count` samples of a dataset, in memory or in a file without a name in `directory`.

    Attributes:
        places: number of samples that have a place in `most_bytes`: those with the lowest indices.
        state: of each: `UNKNOWN`, `SEEN` (its digest is known) or `KEPT`.
        digest: of each, once it is seen.

    Raises:
        OSError: if the file can't be made that large.
    """

    def __init__(self, layout: SampleLayout, count: int, most_bytes: int, directory: Path | None = None) -> None:
        self.layout = layout
        self.places = max(0, min(count, most_bytes // layout.size))
        starts, end = [], 0
        for leaf in layout.leaves:
            starts.append(end)
            end += -(-leaf.size * self.places // _ALIGNED) * _ALIGNED
        self.size = end
        self._memory = _mapped(max(end, 1), directory)
        whole = np.frombuffer(self._memory, np.uint8)
        self._columns = [
            whole[start : start + leaf.size * self.places].reshape(self.places, leaf.size)
            for leaf, start in zip(layout.leaves, starts, strict=True)
        ]
        self._notes = mmap.mmap(-1, max(9 * self.places, 1))
        self.digest = np.frombuffer(self._notes, np.int64, self.places)
        self.state = np.frombuffer(self._notes, np.uint8, self.places, 8 * self.places)

    def note(self, places: Places, rows: Sequence[Bytes], may_keep: Callable[[int], bool]) -> int | None:
        """Note a digest of samples that are new, and keep those that come again with the same one.

        Args:
            places: of the samples, each another one.
            rows: their bytes, leaf by leaf.
            may_keep: asked whether there is room for so many more.

        Returns:
            The place of one whose digest is another than before; None if there is none.
        """
        digests = np.array([hash(parts) for parts in zip(*map(_parts, rows), strict=True)], np.int64)
        keeps = may_keep(int((self.state[places] == SEEN).sum()))  # it looks at the system, and others go on meanwhile
        states = self.state[places]
        new, again = states == UNKNOWN, states == SEEN
        self.digest[places[new]] = digests[new]
        self.state[places[new]] = SEEN
        if not again.any():
            return None
        differs = again & (self.digest[places] != digests)
        if differs.any():
            return int(places[differs][0])
        if keeps:
            for column, leaf in zip(self._columns, rows, strict=True):
                column[places[again]] = leaf if again.all() else leaf[again]
            self.state[places[again]] = KEPT
        return None

    def read(self, places: Places) -> list[Bytes]:
        """Return copies of the rows of some samples, leaf by leaf."""
        return [column.take(places, axis=0) for column in self._columns]

    def holds(self, place: int, parts: Sequence[bytes]) -> bool:
        return all(column[place].tobytes() == part for column, part in zip(self._columns, parts, strict=True))

    def forget(self) -> None:
        self.state[:] = UNKNOWN

    def free(self) -> None:
        """Give the memory back to the system, in all processes; what is read afterwards is zeros."""
        self.forget()
        with contextlib.suppress(AttributeError, OSError):  # systems other than Linux: with the last reference
            self._memory.madvise(mmap.MADV_REMOVE)


def _parts(rows: Bytes) -> list[bytes]:
    return [row.tobytes() for row in rows]


def _mapped(size: int, directory: Path | None) -> mmap.mmap:
    if directory is None:
        return mmap.mmap(-1, size)
    file, name = tempfile.mkstemp(prefix="accel-samples-", dir=directory)
    try:
        os.unlink(name)
        os.truncate(file, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)  # a disk that is full must be an error here, and not a signal later
        return mmap.mmap(file, size)
    finally:
        os.close(file)
