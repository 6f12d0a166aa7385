"""Look through everything that fetching reads, for how to see later whether it has changed."""

from __future__ import annotations

import builtins
import contextvars
import datetime
import decimal
import enum
import itertools
import logging
import math
import os
import pickle
import random
import re
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel.dataio.dataset.content import (
    bytes_of,
    digest_of_array,
    digest_of_entries,
    digest_of_tensor,
    lies_elsewhere,
    memory_of,
    writeable,
)
from accel.dataio.dataset.handles import is_handle
from accel.dataio.dataset.numbers import Owner, is_number
from accel.dataio.dataset.reach import (
    ASKS_BY_TEXT,
    MAKING,
    ClassOf,
    attributes,
    code_parts,
    is_code,
    is_followed,
    is_library,
    named_modules,
    names_of,
    native,
    native_base,
    own_attributes,
    packages,
    slots_of,
)
from accel.dataio.fetching.fetch import Fetch
from accel.profiler.interruptions import ours

Holder = tuple[str, Callable[[], Sequence[Any]], list[Any]]
"""Something with places for objects: its name, what reads them, and those it had."""
_Content = tuple[str, Callable[[], Any], Any]

_MOST = 10_000
# Of a longer container the entries are numbers, texts and tuples of these, or it is only looked at thoroughly.
_LONG = 256
# Entries of long containers compared each time, 20 ns each; a longer list is compared where the batch reads it.
_MOST_ENTRIES = 10_000
_MOST_BYTES = 1 << 20
_SMALL_TENSORS = 64
# Thoroughly, 30 to 100 ms once in an epoch: about what starting a worker takes.
MOST_SLOW_BYTES = 64 << 20
MOST_SLOW_ENTRIES = 1 << 20
_HIDE = (contextvars.ContextVar, threading.local, weakref.ref, weakref.ProxyType, weakref.CallableProxyType)
_FLAT = frozenset({int, float, bool, str, bytes, complex, type(None)})
_UNCHANGING = (range, slice, re.Pattern, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, enum.Enum)
# Packages whose other classes of C code don't change, or hold nothing that a batch is made from.
_UNCHANGING_OF = frozenset(
    {
        *("builtins", "types", "_abc", "_thread", "threading", "weakref", "_weakref", "functools", "_functools"),
        *("operator", "_operator", "pyarrow", "datasets", "torch", "ctypes", "_ctypes", "logging", "_random", "random"),
        *("_contextvars", "contextvars"),
    }
)


@dataclass
class Seen:
    """What was found, each with the state that it had.

    Attributes:
        holders: things that hold others.
        contents: what is compared by its content.
        counted: tensors, by their version counters.
        storages: memory of large tensors, which no array shares.
        tables: long lists with one entry for each sample.
        slow_holders, slow_contents: the same, of what takes longer.
        unseen, unseen_at_all, trained: see `DatasetWatch`.
    """

    holders: list[Holder] = field(default_factory=list)
    contents: list[_Content] = field(default_factory=list)
    counted: list[Tensor] = field(default_factory=list)
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    tables: list[tuple[str, list[Any], list[Any]]] = field(default_factory=list)
    slow_holders: list[Holder] = field(default_factory=list)
    slow_contents: list[_Content] = field(default_factory=list)
    unseen: str = ""
    unseen_at_all: str = ""
    trained: str = ""


def look_through(fetch: Fetch, owned: list[Owner], lengths: Mapping[int, Any], share: float) -> Seen:
    """Look through what a fetch reads.

    Args:
        fetch: what makes the batches.
        owned: objects whose numbers are compared apart.
        lengths: those that a list with an entry for each sample may have.
        share: see `DatasetWatch`.
    """
    walk = _Walk(fetch, owned, lengths, share)
    walk.hold("os.environ", partial(_of_dict, getattr(os.environ, "_data", {})))
    walk.hold("the module builtins", lambda: [len(vars(builtins))])
    seen: dict[int, Any] = {}  # kept, so that no other thing gets one's id
    while queue := walk.waiting or walk.later:
        name, thing = queue.popleft()
        if is_scalar(thing) or id(thing) in seen:
            continue
        walk.is_later = walk.is_later or queue is walk.later
        if len(seen) >= _MOST:
            walk.hide(f"what is beyond the first {_MOST:,} things in {name}")
            break
        seen[id(thing)] = thing
        try:
            walk.look(name, thing)
        except ours():  # a class of the user's may raise whatever it likes
            walk.hide(name)
    return walk.seen


class _Walk:
    def __init__(self, fetch: Fetch, owned: list[Owner], lengths: Mapping[int, Any], share: float) -> None:
        self.seen = Seen()
        self.followed = packages(fetch.dataset, fetch.collate)
        self.waiting = deque([("the dataset", fetch.dataset), ("the collate function", fetch.collate)])
        self.later: deque[tuple[str, Any]] = deque()
        """What needs to be seen only before a batch: entries of which there is a digest, what constructors name."""
        self.is_later = False
        self._lengths = lengths
        self._owned = {id(attributes) for _, attributes, _ in owned}
        self._entries, self._bytes, self._tensors = _MOST_ENTRIES, _MOST_BYTES, _SMALL_TENSORS
        self._slow_bytes, self._slow_entries = int(MOST_SLOW_BYTES * share), int(MOST_SLOW_ENTRIES * share)

    def unsee(self, name: str) -> None:
        """Record something whose change is not seen before a batch."""
        self.seen.unseen = self.seen.unseen or name

    def hide(self, name: str) -> None:
        """Record something whose change is not seen at all."""
        self.unsee(name)
        if not self.is_later:
            self.seen.unseen_at_all = self.seen.unseen_at_all or name

    def hold(self, name: str, read: Callable[[], Sequence[Any]]) -> None:
        """Compare the objects that something holds."""
        self.seen.holders.append((name, read, list(read())))

    def compare(self, name: str, read: Callable[[], Any]) -> None:
        """Compare what is read."""
        self.seen.contents.append((name, read, read()))

    def compare_bytes(self, name: str, size: int, read: Callable[[], Any], digest: Callable[[], int]) -> None:
        """Compare bytes, before each batch if they are few."""
        if size <= self._bytes:
            self._bytes -= size
            self.compare(name, read)
        else:
            self.digest(f"{name}, {size:,} bytes", digest, size)

    def digest(self, name: str, digest: Callable[[], int], size: int) -> None:
        """Compare a digest of so many bytes when an epoch begins."""
        self.unsee(name)
        if size > self._slow_bytes:  # what is smaller may still be looked at
            self.hide(name)
            return
        self._slow_bytes -= size
        self.seen.slow_contents.append((name, digest, digest()))

    def look(self, name: str, thing: Any) -> None:
        """See to one thing; what it holds waits."""
        if is_handle(thing) or isinstance(thing, Event):
            _look_at_shared(self, name, thing)
        elif isinstance(thing, Tensor):
            self._look_at_tensor(name, thing)
        elif isinstance(thing, np.ndarray):
            self._look_at_array(name, thing)
        elif (memory := memory_of(thing)) is not None:
            self.look_at_memory(name, thing, memory)
        elif _random_state(thing) is not None and is_library(type(thing).__module__):
            self.compare(name, partial(_random_state, thing))
        elif isinstance(thing, dict | list | tuple | deque | set | frozenset):
            self._look_at_container(name, thing)
        elif isinstance(thing, types.FunctionType):
            _look_at_function(self, name, thing)
        elif isinstance(thing, types.MethodType):
            _look_at_method(self, name, thing)
        elif isinstance(thing, ClassOf | type):
            _look_at_class(self, thing)
        elif is_code(thing):
            if isinstance(thing, partial):
                self.hold(name, partial(_of_dict, thing.keywords))
            self.waiting += code_parts(name, thing, self.followed)
        elif isinstance(thing, types.ModuleType):
            if not is_library(thing.__name__):
                self.unsee(f"{name}, a module")
        elif not _looked_into(thing):
            self.hide(f"{name}, a {type(thing).__module__}.{type(thing).__qualname__}")
        elif isinstance(thing, _HIDE):
            self.unsee(f"{name}, a {type(thing).__module__}.{type(thing).__qualname__}")
        elif not (isinstance(thing, (*_UNCHANGING, logging.Logger)) and is_library(type(thing).__module__)):
            self._look_at_object(name, thing)

    def _look_at_object(self, name: str, thing: Any) -> None:
        hidden = getattr(type(thing), "accel_hides", ())
        self.hold(name, lambda: [type(thing)])
        if (own := own_attributes(thing)) is not None:
            self.hold(name, partial(_of_owner if id(own) in self._owned else _of_dict, own, hidden))
        if slots := slots_of(type(thing)):
            self.hold(name, partial(_of_all, [partial(slot.__get__, thing) for slot in slots]))
        self.waiting += [(f"{name}.{key}", value) for key, value in attributes(thing)]
        self.waiting.append((type(thing).__qualname__, ClassOf.object(thing)))

    def look_at_memory(self, name: str, thing: Any, memory: Any) -> None:
        """Compare the memory of a thing, and its attributes if it has any."""
        size = memoryview(memory).nbytes
        self.compare_bytes(name, size, partial(bytes, memory), lambda: hash(bytes(memory)))
        if (own := own_attributes(thing)) is not None:
            self.hold(name, partial(_of_dict, own))

    def _look_at_container(self, name: str, thing: Any) -> None:
        read: Callable[[], Sequence[Any]] = partial(_of_dict if isinstance(thing, dict) else list, thing)
        entries: Iterable[tuple[Any, Any]] = thing.items() if isinstance(thing, dict) else enumerate(thing)
        if type(thing) not in (dict, list, tuple, deque, set, frozenset):
            self._look_at_object(name, thing)
        if len(thing) > _LONG and _flat(thing):
            self._look_at_long(name, thing, read)
            return
        # Of a long one that holds plain values a digest is taken, too.
        queue = self.later if len(thing) > _LONG and self._digested(name, thing) else self.waiting
        if len(thing) > _MOST:
            (self.unsee if queue is self.later else self.hide)(f"{name}, {len(thing):,} entries")
            return
        if not isinstance(thing, tuple | frozenset):
            self.hold(name, read)
        if isinstance(thing, dict):
            queue += [(f"a key of {name}", key) for key in thing]
        queue += [(f"{name}[{key!r:.40}]", value) for key, value in list(entries)]

    def _look_at_long(self, name: str, thing: Any, read: Callable[[], Sequence[Any]]) -> None:
        if isinstance(thing, tuple | frozenset):
            return
        is_table = isinstance(thing, list) and len(thing) > _MOST_ENTRIES // 4 and len(thing) in self._lengths
        if len(thing) <= self._entries and not is_table:
            self._entries -= len(thing)
            self.hold(name, read)
            return
        if is_table:
            self.seen.tables.append((name, thing, list(thing)))
        else:
            self.unsee(f"{name}, {len(thing):,} entries")
        if len(thing) > self._slow_entries:
            self.seen.unseen_at_all = self.seen.unseen_at_all or f"{name}, {len(thing):,} entries"
            return
        self._slow_entries -= len(thing)
        self.seen.slow_holders.append((name, read, list(read())))

    def _digested(self, name: str, thing: Any) -> bool:
        """Compare a digest of the entries of a long container when an epoch begins; return False if there is none."""

        def digest(most_bytes: float = math.inf) -> int:
            if isinstance(thing, dict):
                return digest_of_entries(thing.items(), most_bytes)
            return digest_of_entries(sorted(thing) if isinstance(thing, set | frozenset) else thing, most_bytes)

        if len(thing) > self._slow_entries:
            return False
        try:
            value = digest(2 * self._slow_bytes)
        except (TypeError, ValueError):  # no plain values, or too many bytes
            return False
        self._slow_entries -= len(thing)
        self.seen.slow_contents.append((name, digest, value))
        return True

    def _look_at_tensor(self, name: str, tensor: Tensor) -> None:
        if tensor.requires_grad:
            self.seen.trained = self.seen.trained or name
        if tensor.layout != torch.strided or tensor.is_nested or type(tensor) not in (Tensor, torch.nn.Parameter):
            self.unsee(f"{name}, a tensor of another kind")
            if not tensor.is_inference():
                self.compare(name, lambda: tensor._version)
            return
        if vars(tensor):
            self.unsee(f"{name}, a tensor with attributes")
        if not tensor.is_inference():
            self.seen.counted.append(tensor)
        size, on_cpu = tensor.numel() * tensor.element_size(), tensor.device.type == "cpu"
        if on_cpu and self._tensors and size <= self._bytes:
            self._tensors -= 1
            self._bytes -= size
            self.compare(name, partial(bytes_of, tensor))
        elif tensor.is_inference() or (on_cpu and not tensor.untyped_storage().resizable()):
            # Memory that an array shares can be written past the counter; it can't be resized.
            name = f"{name}, a tensor of {size:,} bytes that is written without a trace"
            self.unsee(name)
            # What is written to shared memory reaches the workers.
            if on_cpu and not tensor.is_shared():  # type: ignore[no-untyped-call]
                self.digest(name, partial(digest_of_tensor, tensor), size)
        elif on_cpu:
            self.seen.storages.append(tensor.untyped_storage())

    def _look_at_array(self, name: str, array: np.ndarray[Any, Any]) -> None:
        if type(array) not in (np.ndarray, np.memmap):
            self.unsee(f"{name}, an array of another kind")
        if isinstance(array, np.memmap):
            if array.mode != "r":
                self.hide(name)
            elif array.nbytes > self._bytes:
                self.unsee(f"{name}, {array.nbytes:,} bytes of a file")
            else:
                self._bytes -= array.nbytes
                self.compare(name, array.tobytes)
        elif array.dtype.hasobject and array.size <= _LONG:
            self.hold(name, lambda: array.ravel().tolist())
            self.waiting += [(f"{name}[{place}]", value) for place, value in enumerate(array.ravel().tolist())]
        elif array.dtype.hasobject:
            name = f"{name}, an array of objects"
            (self.unsee if self._digested(name, array.ravel()) else self.hide)(name)
        elif writeable(array):
            self.compare_bytes(
                name,
                array.nbytes,
                lambda: (array.shape, array.dtype, array.tobytes()),
                partial(digest_of_array, array),
            )


def _look_at_shared(walk: _Walk, name: str, thing: Any) -> None:
    """Look at a handle, and at what processes share: workers see that change, but not what was made before."""
    if isinstance(thing, Event):
        walk.compare(name, thing.is_set)
    elif (memory := memory_of(thing)) is not None:
        walk.look_at_memory(name, memory, memory)
    elif lies_elsewhere(thing):
        walk.hide(name)
    else:
        walk.unsee(name)


# -- code --------------------------------------------------------------------------------------------------------------


def _look_at_function(walk: _Walk, name: str, function: types.FunctionType) -> None:
    if not is_followed(function.__module__, walk.followed):
        return
    own = vars(function)
    walk.hold(name, lambda: [function.__code__, function.__defaults__, function.__kwdefaults__, *own, *own.values()])
    if cells := function.__closure__ or ():
        walk.hold(name, partial(_of_all, [partial(getattr, cell, "cell_contents") for cell in cells]))
    names, modules = names_of(function.__code__), named_modules(function)
    if names.by_text or (modules and names.attributes_by_text):
        walk.unsee(f"{function.__qualname__}, which looks things up by texts,")
    if named := sorted(names.globals):
        walk.hold(f"a global of {function.__qualname__}", partial(_of_names, function.__globals__, named))
        if added := [each for each in named if _is_put_in_builtins(each)]:
            walk.hold("the module builtins", partial(_of_names, vars(builtins), added))
            walk.waiting += [(f"builtins.{each}", vars(builtins)[each]) for each in added]
    for module, parts in modules:
        walk.hold(f"an attribute of the module {module.__name__}", partial(_of_names, vars(module), parts))
    walk.waiting += code_parts(name, function, walk.followed)


def _is_put_in_builtins(name: str) -> bool:
    thing = vars(builtins).get(name)
    return thing is not None and getattr(thing, "__module__", None) not in ("builtins", "io", "_sitebuiltins")


def _look_at_method(walk: _Walk, name: str, method: types.MethodType) -> None:
    """Look at what a method's code names of its object: of what else a trainer keeps much changes in each step."""
    owner, named, waiting = method.__self__, set[str](), list[Any]([method.__func__])
    while waiting:
        function = waiting.pop()
        code = getattr(getattr(function, "fget", function), "__code__", None)
        for new in (names_of(code).all if isinstance(code, types.CodeType) else frozenset[str]()) - named:
            named.add(new)
            if is_code(of_class := getattr(type(owner), new, None)):
                waiting.append(of_class)
                walk.waiting.append((f"{name}.{new}", of_class))
    walk.waiting.append((name, method.__func__))
    if not named.isdisjoint(ASKS_BY_TEXT):
        walk.unsee(f"{name}, which looks things up by texts,")
    if (own := own_attributes(owner)) is not None:
        walk.hold(name, partial(_of_names, own, sorted(named)))
        walk.waiting += [(f"{name}.{each}", own[each]) for each in sorted(named & own.keys())]


def _look_at_class(walk: _Walk, thing: Any) -> None:
    of_class = thing if isinstance(thing, ClassOf) else ClassOf.of(thing)
    for kind in of_class.bases(walk.followed):
        walk.hold(kind.__qualname__, partial(_of_dict, vars(kind), ("__slotnames__",)))  # set by the first copy
        if not is_library(type(kind).__module__):
            walk.unsee(f"{kind.__qualname__}, whose class is a metaclass of your own,")
    for name, value in of_class.parts(walk.followed):
        # Code may make further objects of a class: by `cls(…)`, `type(self)(…)`, `dataclasses.replace`.
        is_making = isinstance(thing, ClassOf) and name.rpartition(".")[2] in MAKING
        (walk.later if is_making else walk.waiting).append((name, value))


# -- single values -----------------------------------------------------------------------------------------------------


def is_scalar(thing: Any) -> bool:
    """Return whether a thing is a number, a text or a path that has no attributes of its own."""
    return type(thing) in _FLAT or (
        isinstance(thing, np.number | np.bool_ | PurePath) and type(thing).__dictoffset__ == 0
    )


def _random_state(thing: Any) -> Any:
    """Return the state of a random generator, None of anything else."""
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
    if isinstance(thing, _UNCHANGING):
        return True
    kind = type(thing)
    if isinstance(thing, memoryview | Iterator):
        return False
    return not native(kind) or native_base(kind).__module__.partition(".")[0] in _UNCHANGING_OF


def _flat(entries: Iterable[Any]) -> bool:
    """Return whether entries are numbers, texts and tuples of these."""
    if isinstance(entries, dict):
        return _flat(entries.keys()) and _flat(entries.values())
    kinds = set(map(type, entries))
    if tuple in kinds and kinds - _FLAT == {tuple}:
        pairs = (entry for entry in entries if type(entry) is tuple)
        kinds = set(map(type, itertools.chain.from_iterable(pairs)))
    return kinds <= _FLAT


def _of_dict(holder: Any, hidden: Iterable[str] = ()) -> list[Any]:
    if hidden:
        holder = {name: value for name, value in holder.items() if name not in hidden}
    return [*holder, *holder.values()]


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
