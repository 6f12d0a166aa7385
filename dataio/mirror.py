"""Keep the worker processes' copies of a dataset like the loop's own.

A worker has the dataset as it was when the worker started. When the loop changes it between two epochs
(`dataset.set_epoch(3)`, `dataset.transform.strength = 0.2`), workers that live on would never see it. So the small
state is compared when an epoch begins: numbers and texts, up to four levels deep. What changed is sent to the workers
by its path. A change of anything else (another list, a generator, a tensor written in place) can't be sent: they start
anew.

What is not seen: an array of numpy written in place, a value in a container of more than 256 entries, or in an object
graph beyond its first 10,000 values.

A number that moved by the same step at two epochs running, as an epoch counter does, is expected to move so again. Then
the batches that are fetched ahead are made under the expected state, and thrown away if it comes out otherwise.
"""

from __future__ import annotations

import pickle
import random
import weakref
from collections import deque
from collections.abc import Iterator
from types import MemberDescriptorType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from accel.dataio.dataset_epoch import at_epoch, dataset_epoch
from accel.dataio.witness import callable_code

Path = tuple[tuple[str, Any], ...]
"""How to reach a leaf from the dataset on.

Each step is ("attribute", name), ("item", key or place), ("entry", place) of a tuple, or ("key", key) of a dict whose
key may be another object in a copy.
"""

_DEPTH = 4
_WIDTH = 256
_MOST = 10_000
_SCALARS = (int, float, bool, str, bytes, complex, type(None), np.number, np.bool_)


class State(NamedTuple):
    """A dataset's small state: what can be sent, by path, and a fingerprint of the rest."""

    leaves: dict[Path, Any]
    rest: dict[Path, Any]


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


def state_of(dataset: Any) -> State:
    """Return the small state of `dataset`."""
    state = State({}, {})
    seen: set[int] = set()
    # Breadth first, so that an object which can be reached in several ways is looked into from the nearest.
    waiting: deque[tuple[Any, Path]] = deque([(dataset, ())])
    while waiting:
        thing, path = waiting.popleft()
        if isinstance(thing, _SCALARS):
            state.leaves[path] = thing
            continue
        state.rest[path] = _fingerprint(thing)
        if len(path) < _DEPTH and id(thing) not in seen:
            seen.add(id(thing))
            for step, value in _parts(thing):
                if len(seen) + len(waiting) + len(state.leaves) < _MOST:
                    waiting.append((value, (*path, step)))
    return state


def _fingerprint(thing: Any) -> tuple[Any, ...]:
    same = _Same(thing)
    if isinstance(thing, Tensor):
        return (same, -1 if thing.is_inference() else thing._version)
    if isinstance(thing, torch.Generator):
        return (same, thing.get_state().numpy().tobytes())
    if isinstance(thing, random.Random) and not isinstance(thing, random.SystemRandom):
        return (same, thing.getstate())
    if isinstance(thing, np.random.Generator):
        return (same, pickle.dumps(thing.bit_generator.state))
    if isinstance(thing, np.random.RandomState):
        return (same, pickle.dumps(thing.get_state()))
    if isinstance(thing, set | frozenset):
        return (same, frozenset(thing) if len(thing) <= _WIDTH else len(thing))
    if isinstance(thing, dict | list | tuple | deque):
        return (same, len(thing))
    return (same,)


def _parts(thing: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    if isinstance(thing, dict):
        if len(thing) <= _WIDTH:
            for key, value in list(thing.items()):
                yield ("item" if isinstance(key, _SCALARS) else "key", key), value
    elif isinstance(thing, list | tuple | deque):
        if len(thing) <= _WIDTH:
            kind = "entry" if isinstance(thing, tuple) else "item"
            yield from (((kind, place), value) for place, value in enumerate(list(thing)))
    elif not isinstance(thing, type | Tensor | random.Random) and not callable_code(thing):
        yield from ((("attribute", name), value) for name, value in _attributes(thing))


def _own(thing: Any) -> dict[str, Any] | None:
    """Return an object's attributes without asking the object: its `__getattr__` may do anything."""
    try:
        own = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
    return own if isinstance(own, dict) else None


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    yield from list((_own(thing) or {}).items())
    for base in type(thing).__mro__:
        for name, slot in vars(base).items() if "__slots__" in vars(base) else ():
            if isinstance(slot, MemberDescriptorType):
                try:
                    yield name, slot.__get__(thing)
                except AttributeError:  # not set
                    continue


class Change(NamedTuple):
    """What became of a dataset: the leaves that differ, and whether they are all that differs."""

    leaves: dict[Path, Any]
    sendable: bool

    def __bool__(self) -> bool:
        return bool(self.leaves) or not self.sendable


def compare(old: State, new: State) -> Change:
    """Return what has to be sent to a copy in state `old` to bring it to `new`."""
    changed = {
        path: value
        for path, value in new.leaves.items()
        if path not in old.leaves or not _equal(old.leaves[path], value)
    }
    gone = any(path not in new.leaves for path in old.leaves)
    return Change(changed, old.rest == new.rest and not gone and all(map(_sendable, changed)))


def _equal(one: Any, other: Any) -> bool:
    # True is not 1, and a NaN is itself.
    return one is other or (type(one) is type(other) and bool(one == other or (one != one and other != other)))


def _sendable(path: Path) -> bool:
    return bool(path) and path[-1][0] != "entry" and all(kind != "key" for kind, _ in path)


def apply_leaves(dataset: Any, leaves: dict[Path, Any]) -> None:
    """Set the values in a copy of the dataset, past any `__setattr__` of its classes: they were found that way."""
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
    slot, own = getattr(type(target), name, None), _own(target)
    if own is None or isinstance(slot, MemberDescriptorType):
        object.__setattr__(target, name, value)
    else:
        own[name] = value


class Forecast:
    """Expect a dataset's next state from how it moved between the last epochs.

    Args:
        dataset: whose epoch, if it can tell how it will be in another, is expected to move by one at first.
    """

    def __init__(self, dataset: Any = None) -> None:
        self._steps: dict[Path, int] = {}
        epoch = dataset_epoch(dataset)
        if epoch is not None:
            self.saw(state_of(dataset), state_of(at_epoch(dataset, epoch + 1)))

    def saw(self, old: State, new: State) -> None:
        """Take note of how the dataset moved from one epoch's beginning to the next one's."""
        self._steps = {
            path: value - old.leaves[path]
            for path, value in new.leaves.items()
            if _sendable(path)
            and type(value) is int
            and type(old.leaves.get(path)) is int
            and value != old.leaves[path]
        }

    def next(self, now: State) -> State:
        """Return the state that is expected when the next epoch begins."""
        moved = {path: now.leaves[path] + step for path, step in self._steps.items() if path in now.leaves}
        return State({**now.leaves, **moved}, now.rest)

    def view(self, dataset: Any, expected: State) -> Any:
        """Return `dataset` as it is expected to be, and leave itself alone; None if that can't be had."""
        epoch = dataset_epoch(dataset)
        if epoch is None:
            return None
        # Its epoch is one of the numbers that moved; by how much, the comparison shows.
        for step in set(self._steps.values()):
            view = at_epoch(dataset, epoch + step)
            if not compare(State(expected.leaves, {}), State(state_of(view).leaves, {})):
                return view
        return None
