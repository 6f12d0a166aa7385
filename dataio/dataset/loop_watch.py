"""Whether the loop has changed what fetching reads since batches were begun ahead; asked before each one is used.

Everything that dataset and collate function hold, and that their code names, is looked at: as in a snapshot
(`accel.dataio.dataset.snapshot`), but in some 50 µs.

| what | a change is seen by |
|---|---|
| attributes, slots, entries, class attributes, closures, globals, `os.environ` | another object in its place |
| a tensor | its version counter; of small ones the bytes, too |
| an array, bytes, up to 1 MiB together | its bytes |
| a long list of numbers, texts or tuples of these | its entries; of one as long as the dataset the batch's own |
| what the loop puts into `builtins` | another object in its place |
| a random generator | its state |

What can't be seen so is named by `LoopWatch.unseen`.
"""

from __future__ import annotations

import builtins
import contextvars
import itertools
import logging
import os
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter, is_
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from accel.dataio.dataset.content import C_DATA, Content, bytes_of, writeable
from accel.dataio.dataset.handles import is_handle
from accel.dataio.dataset.reach import (
    ASKS_BY_TEXT,
    ClassOf,
    attributes,
    code_parts,
    is_code,
    is_followed,
    is_library,
    named_modules,
    names_of,
    own_attributes,
    packages,
    slots_of,
)
from accel.dataio.dataset.snapshot import UNCHANGING, looked_into, state_of
from accel.dataio.fetching.fetch import Fetch
from accel.profiler.interruptions import ours

_MOST = 10_000
# Of a longer container the entries are numbers, texts and tuples of these, or it is unseen.
_LONG = 256
# Entries of long containers compared each time, 20 ns each; a longer list is compared where the batch reads it.
_MOST_ENTRIES = 10_000
_MOST_BYTES = 1 << 20
_SMALL_TENSORS = 64
_TURN = 1024
_HIDE = (contextvars.ContextVar, threading.local, weakref.ref, weakref.ProxyType, weakref.CallableProxyType)
_FLAT = frozenset({int, float, bool, str, bytes, complex, type(None)})


class LoopWatch:
    """Sees what the loop changes in the dataset or the collate function of a `Fetch`.

    Args:
        fetch: what makes the batches.

    Attributes:
        unseen: something that the loop could change without being seen; '' if there is nothing of the kind.
        trained: a weight that fetching reads, and that each step changes; '' if there is none.
        change: where `changed` has seen one.

    Example:
        >>> data = [0.5, 1.5]
        >>> watch = LoopWatch(Fetch(data, list, batched=True))
        >>> data[1] = 2.5
        >>> watch.changed(), watch.change
        (True, 'the dataset')
    """

    def __init__(self, fetch: Fetch) -> None:
        self.unseen = self.trained = self.change = ""
        self._holders: list[tuple[str, Callable[[], Sequence[Any]], list[Any]]] = []
        self._contents: list[tuple[str, Callable[[], Any], Any]] = []
        self._counted: list[Tensor] = []
        self._storages: list[torch.UntypedStorage] = []  # of large tensors
        self._tables: list[tuple[str, list[Any], list[Any]]] = []
        self._entries, self._bytes, self._tensors, self._turn = _MOST_ENTRIES, _MOST_BYTES, _SMALL_TENSORS, 0
        self._levels = _levels(fetch.dataset)
        self._followed = packages(fetch.dataset, fetch.collate)
        self._seen: dict[int, Any] = {}  # kept, so that no other thing gets one's id
        self._waiting = deque([("the dataset", fetch.dataset), ("the collate function", fetch.collate)])
        self._holds("os.environ", partial(_of_dict, getattr(os.environ, "_data", {})))
        self._holds("the module builtins", partial(_of_dict, vars(builtins)))
        while self._waiting:
            name, thing = self._waiting.popleft()
            if _is_scalar(thing) or id(thing) in self._seen:
                continue
            if len(self._seen) >= _MOST:
                self._hides(f"what is beyond the first {_MOST:,} things in {name}")
                break
            self._seen[id(thing)] = thing
            try:
                self._look(name, thing)
            except ours():  # a class of the user's may raise whatever it likes
                self._hides(name)
        del self._waiting
        self._versions = _versions(self._counted)

    def changed(self, indices: Any = ()) -> bool:
        """Return whether something is not as it was when this was made.

        Args:
            indices: of the batch that is about to be used.
        """
        try:
            return self._differs(indices)
        except ours():  # what could be compared before can't be now
            return self._differs_at("something")

    def _differs(self, indices: Any) -> bool:
        for name, read, kept in self._holders:
            now = read()
            if (len(now) != len(kept) or not all(map(is_, now, kept))) and not _accepted(now, kept):
                return self._differs_at(name)
        if _versions(self._counted) != self._versions:
            return self._differs_at("a tensor")
        if not all(map(torch.UntypedStorage.resizable, self._storages)):
            return self._differs_at("a tensor, by way of an array that shares its memory")
        for name, read, before in self._contents:
            if read() != before:
                return self._differs_at(name)
        return bool(self._tables) and self._tables_changed(indices)

    def _differs_at(self, name: str) -> bool:
        self.change = name
        return True

    def _tables_changed(self, indices: Any) -> bool:
        rows: dict[int, list[int]] = {}
        places = [int(index) for index in indices] if isinstance(indices, list) else []
        for length, chosen in self._levels:
            rows[length] = rows.get(length, []) + places
            places = places if chosen is None else [int(chosen[place]) for place in places]
        begin, self._turn = self._turn, self._turn + _TURN
        for name, table, kept in self._tables:
            if len(table) != len(kept) or any(not _alike(table[row], kept[row]) for row in rows.get(len(kept), ())):
                return self._differs_at(name)
            part = slice(begin % len(kept), begin % len(kept) + _TURN)  # the others in turn
            now, before = table[part], kept[part]
            if not all(map(is_, now, before)) and not all(map(_alike, now, before)):
                return self._differs_at(name)
        return False

    # -- looking at a thing --------------------------------------------------------------------------------------------

    def _look(self, name: str, thing: Any) -> None:
        if is_handle(thing):
            if Content().of_shared(thing) is not None:
                self._contents.append((name, lambda: Content().of_shared(thing), Content().of_shared(thing)))
            else:
                self._hides(name)
        elif isinstance(thing, Tensor):
            self._look_at_tensor(name, thing)
        elif isinstance(thing, np.ndarray):
            self._look_at_array(name, thing)
        elif isinstance(thing, bytearray | C_DATA):
            memory: Any = thing
            self._compares(name, memoryview(memory).nbytes, partial(bytes, memory))
            if (own := own_attributes(thing)) is not None:
                self._holds(name, partial(_of_dict, own))
        elif state_of(thing) is not None and is_library(type(thing).__module__):
            self._contents.append((name, partial(state_of, thing), state_of(thing)))
        elif isinstance(thing, dict | list | tuple | deque | set | frozenset):
            self._look_at_container(name, thing)
        elif isinstance(thing, types.FunctionType):
            self._look_at_function(name, thing)
        elif isinstance(thing, types.MethodType):
            self._look_at_method(name, thing)
        elif isinstance(thing, ClassOf | type):
            self._look_at_class(name, thing)
        elif is_code(thing):
            if isinstance(thing, partial):
                self._holds(name, partial(_of_dict, thing.keywords))
            self._waiting += code_parts(name, thing, self._followed)
        elif isinstance(thing, types.ModuleType):
            if not is_library(thing.__name__):
                self._hides(f"{name}, a module")
        elif isinstance(thing, _HIDE) or not looked_into(thing):
            self._hides(f"{name}, a {type(thing).__module__}.{type(thing).__qualname__}")
        elif not (isinstance(thing, (*UNCHANGING, logging.Logger)) and is_library(type(thing).__module__)):
            self._look_at_object(name, thing)

    def _hides(self, name: str) -> None:
        self.unseen = self.unseen or name

    def _holds(self, name: str, read: Callable[[], Sequence[Any]]) -> None:
        self._holders.append((name, read, list(read())))

    def _compares(self, name: str, size: int, read: Callable[[], Any]) -> None:
        if size > self._bytes:
            self._hides(f"{name}, {size:,} bytes")
            return
        self._bytes -= size
        self._contents.append((name, read, read()))

    def _look_at_object(self, name: str, thing: Any) -> None:
        hidden = getattr(type(thing), "accel_hides", ())
        self._holds(name, lambda: [type(thing)])
        if (own := own_attributes(thing)) is not None:
            self._holds(name, partial(_of_dict, own, hidden))
        if slots := slots_of(type(thing)):
            self._holds(name, partial(_of_all, [partial(slot.__get__, thing) for slot in slots]))
        self._waiting += [(f"{name}.{key}", value) for key, value in attributes(thing)]
        self._waiting.append((type(thing).__qualname__, ClassOf.object(thing)))

    def _look_at_container(self, name: str, thing: Any) -> None:
        read: Callable[[], Sequence[Any]]
        entries: Iterable[tuple[Any, Any]]
        if isinstance(thing, dict):
            read, entries = partial(_of_dict, thing), thing.items()
        else:
            read, entries = partial(list, thing), enumerate(thing)
        if isinstance(thing, dict) and len(thing) <= _LONG:
            self._waiting += [(f"a key of {name}", key) for key in thing]
        if type(thing) not in (dict, list, tuple, deque, set, frozenset):
            self._look_at_object(name, thing)
        if len(thing) > _LONG and _flat(thing):
            self._look_at_long(name, thing)
        elif len(thing) > _MOST - len(self._seen):
            self._hides(f"{name}, {len(thing):,} entries")
        else:
            if not isinstance(thing, tuple | frozenset):
                self._holds(name, read)
            self._waiting += [(f"{name}[{key!r:.40}]", value) for key, value in list(entries)]

    def _look_at_long(self, name: str, thing: Any) -> None:
        if isinstance(thing, tuple | frozenset):
            return
        is_indexed = len(thing) > _MOST_ENTRIES // 4 and len(thing) in dict(self._levels)
        if len(thing) <= self._entries and not (is_indexed and isinstance(thing, list)):
            self._entries -= len(thing)
            self._holds(name, partial(_of_dict, thing) if isinstance(thing, dict) else partial(list, thing))
            return
        if isinstance(thing, list):
            self._tables.append((name, thing, list(thing)))
        if not is_indexed or not isinstance(thing, list):
            self._hides(f"{name}, {len(thing):,} entries")

    def _look_at_tensor(self, name: str, tensor: Tensor) -> None:
        if tensor.requires_grad:
            self.trained = self.trained or name
        if tensor.layout != torch.strided or tensor.is_nested or type(tensor) not in (Tensor, torch.nn.Parameter):
            self._hides(f"{name}, a tensor of another kind")
            return
        if vars(tensor):
            self._hides(f"{name}, a tensor with attributes")
        size, on_cpu = tensor.numel() * tensor.element_size(), tensor.device.type == "cpu"
        if on_cpu and self._tensors and size <= self._bytes:
            self._tensors -= 1
            self._compares(name, size, partial(bytes_of, tensor))
        elif tensor.is_inference() or (on_cpu and not tensor.untyped_storage().resizable()):
            # Memory that an array shares can be written past the counter; it can't be resized.
            self._hides(f"{name}, a tensor of {size:,} bytes that is written without a trace")
        elif on_cpu:
            self._storages.append(tensor.untyped_storage())
        if not tensor.is_inference():
            self._counted.append(tensor)

    def _look_at_array(self, name: str, array: np.ndarray[Any, Any]) -> None:
        if type(array) not in (np.ndarray, np.memmap):
            self._hides(f"{name}, an array of another kind")
        elif array.dtype.hasobject and array.size <= _LONG:
            self._holds(name, lambda: array.ravel().tolist())
            self._waiting += [(f"{name}[{place}]", value) for place, value in enumerate(array.ravel().tolist())]
        elif array.dtype.hasobject:
            self._hides(f"{name}, an array of objects")
        elif writeable(array):
            self._compares(name, array.nbytes, lambda: (array.shape, array.dtype, array.tobytes()))

    # -- looking at code -----------------------------------------------------------------------------------------------

    def _look_at_function(self, name: str, function: types.FunctionType) -> None:
        if not is_followed(function.__module__, self._followed):
            return
        self._holds(name, partial(_of_dict, vars(function)))
        self._holds(name, lambda: [function.__code__, function.__defaults__, function.__kwdefaults__])
        if cells := function.__closure__ or ():
            self._holds(name, partial(_of_all, [partial(getattr, cell, "cell_contents") for cell in cells]))
        names, modules = names_of(function.__code__), named_modules(function)
        if names.by_text or (modules and names.attributes_by_text):
            self._hides(f"{function.__qualname__}, which looks things up by texts,")
        if named := sorted(names.globals):
            self._holds(f"a global of {function.__qualname__}", partial(_of_names, function.__globals__, named))
            self._waiting += [(f"builtins.{each}", vars(builtins)[each]) for each in named if _is_put_in_builtins(each)]
        for module, parts in modules:
            self._holds(f"an attribute of the module {module.__name__}", partial(_of_names, vars(module), parts))
        self._waiting += code_parts(name, function, self._followed)

    def _look_at_method(self, name: str, method: types.MethodType) -> None:
        """Look at what a method's code names of its object: of what else a trainer keeps much changes in each step."""
        owner, named, waiting = method.__self__, set[str](), list[Any]([method.__func__])
        while waiting:
            function = waiting.pop()
            code = getattr(getattr(function, "fget", function), "__code__", None)
            for new in (names_of(code).all if isinstance(code, types.CodeType) else frozenset[str]()) - named:
                named.add(new)
                if is_code(of_class := getattr(type(owner), new, None)):
                    waiting.append(of_class)
                    self._waiting.append((f"{name}.{new}", of_class))
        self._waiting.append((name, method.__func__))
        if not named.isdisjoint(ASKS_BY_TEXT):
            self._hides(f"{name}, which looks things up by texts,")
        if (own := own_attributes(owner)) is not None:
            self._holds(name, partial(_of_names, own, sorted(named)))
            self._waiting += [(f"{name}.{each}", own[each]) for each in sorted(named & own.keys())]

    def _look_at_class(self, name: str, thing: Any) -> None:
        of_class = thing if isinstance(thing, ClassOf) else ClassOf.of(thing)
        for kind in of_class.bases(self._followed):
            self._holds(kind.__qualname__, partial(_of_dict, vars(kind)))
            if not is_library(type(kind).__module__):
                self._hides(f"{kind.__qualname__}, whose class is a metaclass of your own,")
        # Code may make further objects of a class: by `cls(…)`, `type(self)(…)`, `dataclasses.replace`.
        self._waiting += of_class.parts(self._followed, making=True)


def _levels(dataset: Any) -> list[tuple[int, Any]]:
    """Return the lengths of a dataset and those within its `Subset`s, with the places that these choose in the next."""
    levels = []
    while True:
        chosen = dataset.indices if type(dataset) is Subset else None
        try:
            levels.append((len(dataset), chosen))
        except ours():  # it has none
            levels.append((-1, chosen))
        if chosen is None:
            return levels
        dataset = dataset.dataset


def _accepted(now: Sequence[Any], kept: list[Any]) -> bool:
    """Return whether objects that are others now say the same, and go on with these."""
    if len(now) != len(kept):
        return False
    for new, old in zip(now, kept, strict=True):
        if not _alike(new, old) and not (old is None and is_handle(new)):
            return False
    kept[:] = now
    return True


def _alike(new: Any, old: Any) -> bool:
    """Return whether something is the same thing, or an equal number, text or tuple: 1 is not 1.0, and 0.0 not -0.0."""
    if new is old:
        return True
    if type(new) is tuple and type(old) is tuple:
        return len(new) == len(old) and all(map(_alike, new, old))
    return type(new) is type(old) and _is_scalar(new) and repr(new) == repr(old)


def _is_scalar(thing: Any) -> bool:
    # One of a class of the user's may have attributes.
    return type(thing) in _FLAT or (
        isinstance(thing, np.number | np.bool_ | PurePath) and type(thing).__dictoffset__ == 0
    )


def _is_put_in_builtins(name: str) -> bool:
    thing = vars(builtins).get(name)
    return thing is not None and getattr(thing, "__module__", None) not in ("builtins", "io", "_sitebuiltins")


def _flat(entries: Iterable[Any]) -> bool:
    """Return whether entries are numbers, texts and tuples of these."""
    if isinstance(entries, dict):
        return _flat(entries.keys()) and _flat(entries.values())
    values = entries
    kinds = set(map(type, values))
    if tuple in kinds and kinds - _FLAT == {tuple}:
        pairs = (entry for entry in values if type(entry) is tuple)
        kinds = set(map(type, itertools.chain.from_iterable(pairs)))
    return kinds <= _FLAT


def _of_dict(holder: Any, hidden: Iterable[str] = ()) -> list[Any]:
    if hidden:
        holder = {name: value for name, value in holder.items() if name not in hidden}
    return [*holder, *holder.values()]


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


def _versions(tensors: list[Tensor]) -> list[int]:
    attributes_each = map(len, map(attrgetter("__dict__"), tensors))  # of one that has any nothing is seen
    return [*map(attrgetter("_version"), tensors), *map(Tensor.data_ptr, tensors), *attributes_each]
