"""Snapshots of a dataset, by which the worker processes' copies are kept like the loop's own.

A worker has the dataset as it was when the worker started. When the loop changes it between two epochs
(`dataset.set_epoch(3)`, `dataset.transform.strength = 0.2`), workers that live on would never see it. So its state is
compared when an epoch begins, up to eight levels deep. Numbers and texts that changed are sent to the workers by their
path. A change of anything else (another list, a generator, a tensor or an array written in place, an entry of a
long list, a global that the dataset's or the collate function's code names) can't be sent: they start anew. What only
constructors name is left out, since fetching calls none, and so is what functions name more than eight levels away.

What can't be looked into whether it has changed (objects of C code, more than 64 MiB of arrays, more than a million
entries of long containers or 10,000 other values) may have: `DatasetSnapshot.whole` is False then.

A number that moved by the same step at two epochs running, as an epoch counter does, is expected to move so again. Then
the batches that are fetched ahead are made under the expected state, and thrown away if it comes out otherwise.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import logging
import os
import pickle
import random
import re
import types
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import PurePath
from types import MemberDescriptorType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from accel.dataio.dataset.content import C_DATA, Content
from accel.dataio.dataset.dataset_epoch import at_epoch, dataset_epoch
from accel.dataio.dataset.handles import is_handle
from accel.dataio.dataset.reach import (
    ClassOf,
    attributes,
    code_parts,
    is_code,
    native,
    native_base,
    own_attributes,
    packages,
)
from accel.dataio.fetching.fetch import Fetch

Path = tuple[tuple[str, Any], ...]
"""How to reach a leaf from the dataset on.

Each step is ("attribute", name), ("item", key or place), ("entry", place) of a tuple, ("key", key) of a dict whose key
may be another object in a copy, or ("code", name) of what is no part of a copy.
"""

_DEPTH = 8
_WIDTH = 256
_MOST = 10_000
SCALARS = (int, float, bool, str, bytes, complex, type(None), np.number, np.bool_, PurePath)


class DatasetSnapshot(NamedTuple):
    """A dataset's small state: values that can be sent, by path, and fingerprints of the rest."""

    leaves: dict[Path, Any]
    rest: dict[Path, Any]
    whole: bool = True
    """False if a part of it can't be inspected."""


class _Same:
    """Equal only to another one of the very same object: an id alone is given to a later object once that one is gone.

    Lists, dicts and tuples bear no weak reference: one that the loop replaced lives until the next epoch begins.
    """

    __slots__ = ("_get",)

    def __init__(self, thing: Any) -> None:
        try:
            self._get: Any = weakref.ref(thing)
        except TypeError:
            self._get = lambda: thing

    def __eq__(self, other: object) -> bool:
        mine = self._get()
        return mine is not None and isinstance(other, _Same) and mine is other._get()

    __hash__ = None  # type: ignore[assignment]


class _Handle(_Same):
    """An open file or the like. One that was None before is no change: each process opens it for itself."""

    def __eq__(self, other: object) -> bool:
        return other is None or super().__eq__(other)

    __hash__ = None


def take_snapshot(dataset: Any, share: float = 1.0) -> DatasetSnapshot:
    """Return the small state of `dataset`, or of a `Fetch`.

    Args:
        dataset: is looked into.
        share: of the most that is looked into of big arrays and long containers, see `Content`.
    """
    leaves: dict[Path, Any] = {}
    rest: dict[Path, Any] = {(("code", "environment"),): dict(getattr(os.environ, "_data", {}))}
    content, seen = Content(share), set[int]()
    followed = packages(*((dataset.dataset, dataset.collate) if isinstance(dataset, Fetch) else (dataset,)))
    # Breadth first, so that an object which can be reached in several ways is looked into from the nearest.
    waiting: deque[tuple[Any, Path]] = deque([(dataset, ())])
    while waiting:
        thing, path = waiting.popleft()
        if isinstance(thing, SCALARS):
            leaves[path] = thing
            continue
        if is_handle(thing):
            leaves[path] = _Handle(thing)
            if id(thing) not in seen:
                seen.add(id(thing))
                if (shown := content.of_shared(thing)) is not None:
                    rest[path] = shown
            continue
        known = id(thing) in seen
        rest[path] = _fingerprint(thing, None if known else content)
        if known:
            continue
        seen.add(id(thing))
        for step, value in _parts(thing, followed):
            if len(path) == _DEPTH and _is_code_path(path):
                break  # what functions name that other ones name is taken to stay as it is
            if len(path) == _DEPTH or len(seen) + len(waiting) + len(leaves) >= _MOST:
                content.unseen()
                break
            waiting.append((value, (*path, step)))
    return DatasetSnapshot(leaves, rest, content.whole)


def _is_code_path(path: Path) -> bool:
    return sum(kind == "code" for kind, _ in path) >= _DEPTH // 2


def _fingerprint(thing: Any, content: Content | None) -> tuple[Any, ...]:
    """Return what identifies an object and its contents; without `content`, the object alone."""
    same = _Same(thing)
    if (state := state_of(thing)) is not None:
        return (same, state)
    if content is None:
        return (same,)
    if isinstance(thing, Tensor):
        return (same, -1 if thing.is_inference() else thing._version, content.of_tensor(thing))
    if isinstance(thing, np.ndarray):
        return (same, content.of_array(thing))
    if isinstance(thing, C_DATA):
        return (same, content.of_memory(thing))
    if isinstance(thing, bytearray):
        return (same, content.of_bytes(thing))
    if isinstance(thing, set | frozenset):
        small = len(thing) <= _WIDTH
        return (same, frozenset(thing) if small else content.of_entries(sorted(map(repr, thing)), len(thing)))
    if isinstance(thing, dict | list | tuple | deque):
        entries = thing.items() if isinstance(thing, dict) else thing
        return (same, len(thing), 0 if len(thing) <= _WIDTH else content.of_entries(entries, len(thing)))
    if not looked_into(thing):
        content.unseen()
    return (same,)


def state_of(thing: Any) -> Any:
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


def looked_into(thing: Any) -> bool:
    """Return whether there is nothing to a thing but what its parts show; or nothing that can change."""
    if is_code(thing) or isinstance(thing, (*UNCHANGING, ClassOf)):
        return True
    kind = type(thing)
    if isinstance(thing, memoryview | Iterator):
        return False
    return not native(kind) or native_base(kind).__module__.partition(".")[0] in _UNCHANGING_OF


UNCHANGING = (range, slice, re.Pattern, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, enum.Enum)
# Packages whose other classes of C code don't change, or hold nothing that a batch is made from.
_UNCHANGING_OF = frozenset(
    {
        *("builtins", "types", "_abc", "_thread", "threading", "weakref", "_weakref", "functools", "_functools"),
        *("operator", "_operator", "pyarrow", "datasets", "torch", "ctypes", "_ctypes", "logging", "_random", "random"),
    }
)


def _parts(thing: Any, followed: set[str]) -> Iterator[tuple[tuple[str, Any], Any]]:
    if isinstance(thing, dict):
        if len(thing) <= _WIDTH:
            for key, value in list(thing.items()):
                yield ("item" if isinstance(key, SCALARS) else "key", key), value
        if type(thing) is not dict:
            yield from ((("attribute", name), value) for name, value in attributes(thing))
    elif isinstance(thing, list | tuple | deque):
        if len(thing) <= _WIDTH:
            kind = "entry" if isinstance(thing, tuple) else "item"
            yield from (((kind, place), value) for place, value in enumerate(list(thing)))
        if type(thing) not in (list, tuple, deque):
            yield from ((("attribute", name), value) for name, value in attributes(thing))
    elif is_code(thing):
        yield from ((("code", name), value) for name, value in code_parts("", thing, followed))
    elif isinstance(thing, ClassOf):
        yield from ((("code", name), value) for name, value in thing.parts(followed))
    elif not isinstance(thing, Tensor | random.Random | types.ModuleType | logging.Logger):
        yield from ((("attribute", name), value) for name, value in attributes(thing))
        yield ("code", "class"), ClassOf.object(thing)


class Change(NamedTuple):
    """The difference of two snapshots: the leaves that differ, and whether sending them is enough."""

    leaves: dict[Path, Any]
    sendable: bool

    def __bool__(self) -> bool:
        return bool(self.leaves) or not self.sendable


def compare(old: DatasetSnapshot, new: DatasetSnapshot) -> Change:
    """Return what has to be sent to a copy in state `old` to bring it to `new`."""
    changed = {
        path: value
        for path, value in new.leaves.items()
        if path not in old.leaves or not is_same(old.leaves[path], value)
    }
    gone = any(path not in new.leaves for path in old.leaves)
    sendable = all(_sendable(path) and not isinstance(value, _Handle) for path, value in changed.items())
    return Change(changed, sendable and not gone and old.rest == new.rest)


def is_same(old: Any, new: Any) -> bool:
    if isinstance(old, _Handle) or isinstance(new, _Handle):
        return bool(old == new)
    # True is not 1, and a NaN is itself.
    return old is new or (type(old) is type(new) and bool(old == new or (old != old and new != new)))


def _sendable(path: Path) -> bool:
    return bool(path) and path[-1][0] != "entry" and all(kind not in ("key", "code") for kind, _ in path)


def apply_leaves(dataset: Any, leaves: dict[Path, Any]) -> None:
    """Set the values in a copy of what `take_snapshot` looked at, past any `__setattr__`, as they were read."""
    for path, value in leaves.items():
        target = dataset
        for kind, name in path[:-1]:
            target = object.__getattribute__(target, name) if kind == "attribute" else target[name]
        kind, name = path[-1]
        if kind == "attribute":
            _set(target, name, value)
        else:
            target[name] = value


def _set(target: Any, name: str, value: Any) -> None:
    slot, own = getattr(type(target), name, None), own_attributes(target)
    if own is None or isinstance(slot, MemberDescriptorType):
        object.__setattr__(target, name, value)
    else:
        own[name] = value


class Forecast:
    """Expect a dataset's next state from how it moved between the last epochs.

    Args:
        fetch: of a dataset whose epoch is expected to increase by one at first, if it has `at_epoch`.
    """

    def __init__(self, fetch: Fetch | None = None) -> None:
        self._steps: dict[Path, int] = {}
        epoch = None if fetch is None else dataset_epoch(fetch.dataset)
        if fetch is not None and epoch is not None:
            self.saw(take_snapshot(fetch), take_snapshot(fetch.of(at_epoch(fetch.dataset, epoch + 1))))

    def saw(self, old: DatasetSnapshot, new: DatasetSnapshot) -> None:
        """Record how the dataset changed from one epoch's beginning to the next one's."""
        self._steps = {
            path: value - old.leaves[path]
            for path, value in new.leaves.items()
            if _sendable(path)
            and type(value) is int
            and type(old.leaves.get(path)) is int
            and value != old.leaves[path]
        }

    def next(self, now: DatasetSnapshot) -> DatasetSnapshot:
        """Return the state that is expected when the next epoch begins."""
        moved = {path: now.leaves[path] + step for path, step in self._steps.items() if path in now.leaves}
        return DatasetSnapshot({**now.leaves, **moved}, now.rest, now.whole)

    def view(self, fetch: Fetch, expected: DatasetSnapshot) -> Any:
        """Return the dataset of `fetch` as it is expected to be, and leave itself alone; None if that can't be had."""
        dataset = fetch.dataset
        epoch = dataset_epoch(dataset)
        if epoch is None:
            return None
        # Its epoch is one of the numbers that moved; by how much, the comparison shows.
        for step in set(self._steps.values()):
            view = at_epoch(dataset, epoch + step)
            if not compare(
                DatasetSnapshot(expected.leaves, {}), DatasetSnapshot(take_snapshot(fetch.of(view)).leaves, {})
            ):
                return view
        return None
