"""Look through everything that fetching reads, for how to see later whether it has changed."""

from __future__ import annotations

import contextvars
import ctypes
import datetime
import decimal
import enum
import logging
import math
import os
import pickle
import random
import re
import threading
import types
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel.dataio.dataset import reach
from accel.dataio.dataset.handles import is_handle
from accel.dataio.dataset.numbers import Owner, is_number
from accel.dataio.fetching import wire
from accel.dataio.fetching.fetch import Fetch
from accel.profiler.errors import InvalidArgument
from accel.profiler.interruptions import ours

Holder = tuple[str, Callable[[], Sequence[Any]], list[Any]]
"""Something with places for objects: its name, what reads them, and those it had."""
Content = tuple[str, Callable[[], Any], Any]

# Entries of which a digest is taken at once.
_CHUNK = 4096
# Entries of long containers compared each time, 20 ns each; a longer list is compared where the batch reads it.
_MOST_ENTRIES = 10_000
_MOST_BYTES = 1 << 20
_SMALL_TENSORS = 64
# Thoroughly, 30 to 100 ms once in an epoch: about what starting a worker takes.
MOST_SLOW_BYTES = 64 << 20
MOST_SLOW_ENTRIES = 1 << 20
_UNSEEN = (contextvars.ContextVar, threading.local, weakref.ref, weakref.ProxyType, weakref.CallableProxyType)
_UNCHANGING = (
    *(range, slice, re.Pattern, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, enum.Enum),
    *(logging.Logger, torch.dtype, torch.device, np.dtype),
)
# Packages whose other classes of C code don't change, or hold nothing that a batch is made from.
_UNCHANGING_OF = frozenset(
    {
        *("builtins", "types", "_abc", "_thread", "threading", "weakref", "_weakref", "functools", "_functools"),
        *("operator", "_operator", "pyarrow", "datasets", "torch", "logging", "_random", "random"),
        *("_contextvars", "contextvars"),
    }
)


_COMPILERS = tuple(map(os.environ.encodekey, ("TORCH", "_TORCH", "TRITON", "KMP_", "CUDA_HOME")))


class Walk:
    """Looks through what a fetch reads, and notes the state of each thing.

    Numbers of the objects `owned` are compared apart; a list with an entry for each sample has one
    of `lengths`.
    """

    def __init__(self, fetch: Fetch, owned: list[Owner], lengths: Iterable[int], share: float) -> None:
        self.holders: list[Holder] = []
        self.contents: list[Content] = []
        self.counted: list[Tensor] = []
        self.storages: list[torch.UntypedStorage] = []
        self.tables: list[tuple[str, list[Any], list[Any]]] = []
        self.slow_holders: list[Holder] = []
        self.slow_contents: list[Content] = []
        self.unseen = self.unseen_at_all = ""
        self._lengths, self._owned = set(lengths), {id(attributes) for _, attributes, _ in owned}
        self._entries, self._bytes, self._tensors = _MOST_ENTRIES, _MOST_BYTES, _SMALL_TENSORS
        self._slow_bytes, self._slow_entries = int(MOST_SLOW_BYTES * share), int(MOST_SLOW_ENTRIES * share)
        self._classes: set[type] = set()
        self.followed = reach.packages(fetch.dataset, fetch.collate)
        self._look_through(fetch)

    def _look_through(self, fetch: Fetch) -> None:
        self.hold("os.environ", partial(_of_environment, getattr(os.environ, "_data", {})))
        roots = ("the dataset", fetch.dataset), ("the collate function", fetch.collate)
        for count, (name, thing) in enumerate(reach.reachable(*roots, cached=False), 1):
            try:
                if not reach.is_scalar(thing):
                    self._look(name, thing)
            except ours():  # a class of the user's may raise whatever it likes
                self._hide(name)
            if count == reach.MOST:
                self._hide(f"what is beyond the first {reach.MOST:,} things in {name}")

    def _look(self, name: str, thing: Any) -> None:
        if type(thing).__module__.startswith("multiprocessing"):  # what it stands for lies in other processes, too
            self._hide(name)
        elif is_handle(thing) or isinstance(thing, _UNSEEN):
            self.unsee(f"{name}, a {type(thing).__module__}.{type(thing).__qualname__}")
        elif isinstance(thing, Tensor):
            self._look_at_tensor(name, thing)
        elif isinstance(thing, np.ndarray):
            self._look_at_array(name, thing)
        elif isinstance(thing, bytearray):
            self._compare_bytes(name, thing, len(thing), partial(bytes, thing))
        elif _random_state(thing) is not None and reach.is_library(type(thing).__module__):
            self._compare(name, partial(_random_state, thing))
        elif isinstance(thing, types.FunctionType):
            _look_at_function(self, name, thing)
        elif isinstance(thing, types.MethodType):
            _look_at_method(self, name, thing)
        elif isinstance(thing, type):
            self._look_at_class(thing)
        elif isinstance(thing, types.ModuleType):
            if not reach.is_library(thing.__name__):
                self.unsee(f"{name}, a module")
        elif isinstance(thing, partial):
            self.hold(name, partial(_of_dict, thing.keywords))
        elif isinstance(thing, _UNCHANGING) and reach.is_library(type(thing).__module__):
            return
        elif not reach.is_code(thing):
            self._look_at_object(name, thing)

    # -- noting --------------------------------------------------------------------------------------------------------

    def unsee(self, name: str) -> None:
        """Note something whose change is not seen before a batch."""
        self.unseen = self.unseen or name

    def _hide(self, name: str) -> None:
        """Note something whose change is not seen at all."""
        self.unsee(name)
        self.unseen_at_all = self.unseen_at_all or name

    def hold(self, name: str, read: Callable[[], Sequence[Any]]) -> None:
        self.holders.append((name, read, list(read())))

    def _compare(self, name: str, read: Callable[[], Any]) -> None:
        self.contents.append((name, read, read()))

    def _compare_bytes(self, name: str, thing: Any, size: int, read: Callable[[], Any]) -> None:
        if size <= self._bytes:
            self._bytes -= size
            self._compare(name, read)
        else:
            self._digest(f"{name}, {size:,} bytes", thing, size)

    def _digest(self, name: str, thing: Any, size: int) -> None:
        """Compare a digest of so many bytes when an epoch begins."""
        self.unsee(name)
        if size > self._slow_bytes:  # what is smaller may still be looked at
            self._hide(name)
            return
        self._slow_bytes -= size
        digest = partial(_digest_of, [thing], math.inf)
        self.slow_contents.append((name, digest, digest()))

    # -- kinds of things -----------------------------------------------------------------------------------------------

    def _look_at_object(self, name: str, thing: Any) -> None:
        kind = type(thing)
        if isinstance(thing, reach.CONTAINERS):
            self._look_at_entries(name, thing, partial(_of_dict if isinstance(thing, dict) else list, thing))
        elif not _looked_into(thing):
            self._hide(f"{name}, a {kind.__module__}.{kind.__qualname__}")
            return
        if kind in reach.CONTAINERS:
            return
        self.hold(name, lambda: [type(thing)])
        if (own := reach.own_attributes(thing)) is not None:
            read = _of_owner if id(own) in self._owned else _of_dict
            self.hold(name, partial(read, own, getattr(kind, "accel_hides", ())))
        if slots := reach.slots_of(kind):
            self.hold(name, partial(_of_all, [partial(slot.__get__, thing) for slot in slots]))
        self._look_at_class(kind)

    def _look_at_entries(self, name: str, thing: Any, read: Callable[[], Sequence[Any]]) -> None:
        flat = reach.is_flat(thing)
        if isinstance(thing, tuple | frozenset) and (flat or len(thing) <= reach.LOOKED):
            return
        is_table = isinstance(thing, list) and len(thing) > _MOST_ENTRIES // 4 and len(thing) in self._lengths
        if len(thing) <= reach.LOOKED:
            self.hold(name, read)
        elif flat and len(thing) <= self._entries and not is_table:
            self._entries -= len(thing)
            self.hold(name, read)
        else:
            name = f"{name}, {len(thing):,} entries"
            if flat and is_table:
                self.tables.append((name, thing, list(thing)))
            else:
                self.unsee(name)
            self._look_at_many(name, len(thing), read, flat)

    def _look_at_many(self, name: str, count: int, read: Callable[[], Sequence[Any]], flat: bool) -> None:
        """Compare entries when an epoch begins: those that are flat one by one, of others a digest."""
        if count > self._slow_entries:
            self.unseen_at_all = self.unseen_at_all or name
            return
        self._slow_entries -= count
        if flat:
            self.slow_holders.append((name, read, list(read())))
            return
        try:
            value = _digest_of(read(), 2 * self._slow_bytes)
        except ours():  # what can't be pickled, or too many bytes
            self._hide(name)
            return
        self.slow_contents.append((name, lambda: _digest_of(read(), math.inf), value))

    def _look_at_tensor(self, name: str, tensor: Tensor) -> None:
        if tensor.layout != torch.strided or tensor.is_nested or type(tensor) not in (Tensor, torch.nn.Parameter):
            self._hide(f"{name}, a tensor of another kind")
            return
        if vars(tensor):
            self.unsee(f"{name}, a tensor with attributes")
        if not tensor.is_inference():
            self.counted.append(tensor)
        if tensor.device.type != "cpu":
            return
        size = tensor.numel() * tensor.element_size()
        if self._tensors and size <= self._bytes:
            self._tensors -= 1
            self._bytes -= size
            self._compare(name, partial(_bytes_of, tensor))
        elif not tensor.is_inference() and tensor.untyped_storage().resizable():
            self.storages.append(tensor.untyped_storage())
        elif tensor.is_shared():  # type: ignore[no-untyped-call]  # what is written there reaches the workers
            self.unsee(name)
        else:
            # Memory that an array shares can be written past the counter; it can't be resized.
            self._digest(f"{name}, a tensor of {size:,} bytes that is written without a trace", tensor, size)

    def _look_at_array(self, name: str, array: np.ndarray[Any, Any]) -> None:
        if isinstance(array, np.memmap):
            (self.unsee if array.mode == "r" else self._hide)(f"{name}, a part of a file")
        elif array.dtype.hasobject:
            self._look_at_entries(name, array.ravel().tolist(), lambda: array.ravel().tolist())
        else:
            if type(array) is not np.ndarray:
                self.unsee(f"{name}, an array of another kind")
            self._compare_bytes(name, array, array.nbytes, lambda: (array.shape, array.dtype, array.tobytes()))

    def _look_at_class(self, kind: type) -> None:
        for each in reach.bases(kind, self.followed):
            if each not in self._classes:
                self._classes.add(each)
                own = partial(_of_dict, vars(each), ("__slotnames__",))  # set by the first copy
                self.hold(each.__qualname__, own)


# -- code --------------------------------------------------------------------------------------------------------------


def _look_at_function(walk: Walk, name: str, function: types.FunctionType) -> None:
    if not reach.is_followed(function.__module__, walk.followed):
        return
    own = vars(function)
    walk.hold(name, lambda: [function.__code__, function.__defaults__, function.__kwdefaults__, *_of_dict(own)])
    if cells := function.__closure__ or ():
        walk.hold(name, partial(_of_all, [partial(getattr, cell, "cell_contents") for cell in cells]))
    names, modules = reach.names_of(function.__code__), reach.named_modules(function)
    if names.by_text or (modules and names.attributes_by_text):
        walk.unsee(f"{function.__qualname__}, which looks things up by texts,")
    if named := sorted(names.globals):
        walk.hold(f"a global of {function.__qualname__}", partial(_of_names, function.__globals__, named))
    for module, parts in modules:
        walk.hold(f"an attribute of the module {module.__name__}", partial(_of_names, vars(module), parts))


def _look_at_method(walk: Walk, name: str, method: types.MethodType) -> None:
    named = reach.names_of_method(method).all
    if not named.isdisjoint(reach.ASKS_BY_TEXT):
        walk.unsee(f"{name}, which looks things up by texts,")
    if (own := reach.own_attributes(method.__self__)) is not None:
        walk.hold(name, partial(_of_names, own, sorted(named)))


# -- single values -----------------------------------------------------------------------------------------------------


def _digest_of(entries: Iterable[Any], most_bytes: float) -> int:
    """Return a digest of what can be pickled.

    Raises:
        InvalidArgument: if it takes more than `most_bytes`.
    """
    digest, left = 0, iter(entries)
    while chunk := list(islice(left, _CHUNK)):
        packed = wire.pack(chunk)
        most_bytes -= len(packed.payload) + packed.size
        if most_bytes < 0:
            raise InvalidArgument("too many bytes")
        digest = zlib.crc32(packed.payload, digest)
        for piece in packed.pieces:
            digest = zlib.crc32(piece, digest)
    return digest


def _bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor on the CPU; not by way of an array, or its memory couldn't be resized any more."""
    dense = tensor.detach().contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.numel() * dense.element_size())


def _random_state(thing: Any) -> Any:
    if isinstance(thing, torch.Generator):
        return thing.get_state().numpy().tobytes()
    if isinstance(thing, random.Random) and not isinstance(thing, random.SystemRandom):
        return thing.getstate()
    if isinstance(thing, np.random.Generator):
        return pickle.dumps(thing.bit_generator.state)
    if isinstance(thing, np.random.RandomState):
        return pickle.dumps(thing.get_state())
    return None


def _looked_into(thing: Any) -> bool:
    """Return whether there is nothing to a thing but what its parts show; or nothing that can change."""
    kind = type(thing)
    if isinstance(thing, memoryview | Iterator):
        return False
    is_known = isinstance(thing, _UNCHANGING) or reach.native_base(kind).__module__.partition(".")[0] in _UNCHANGING_OF
    return is_known or not reach.native(kind)


def _of_dict(holder: Any, hidden: Iterable[str] = ()) -> list[Any]:
    if hidden:
        holder = {name: value for name, value in holder.items() if name not in hidden}
    return [*holder, *holder.values()]


def _of_environment(holder: Any) -> list[Any]:
    """Return the environment without what torch's compiler and Triton write to it as they compile."""
    return _of_dict({name: value for name, value in holder.items() if not name.startswith(_COMPILERS)})


def _of_owner(holder: Any, hidden: Iterable[str]) -> list[Any]:
    """Return the attributes of an object whose numbers are compared apart."""
    return _of_dict({name: value for name, value in holder.items() if name not in hidden and not is_number(value)})


def _of_names(holder: Any, names: Iterable[str]) -> list[Any]:
    return [holder.get(name) for name in names]


def _of_all(readers: Iterable[Callable[[], Any]]) -> list[Any]:
    values = []
    for read in readers:
        try:
            values.append(read())
        except ours(AttributeError, ValueError):  # a slot or a cell that is not set
            values.append(None)
    return values
