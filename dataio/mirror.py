"""Keep the worker processes' copies of a dataset like the loop's own.

A worker has the dataset as it was when the worker started. When the loop changes it between two epochs
(`dataset.set_epoch(3)`, `dataset.transform.strength = 0.2`), workers that live on would never see it. So the small
state is compared when an epoch begins: numbers and texts, up to four levels deep. What changed is sent to the workers
by its path. A change of anything else (another list, a generator, a tensor written in place) can't be sent: they start
anew.

A number that moved by the same step at two epochs running, as an epoch counter does, is expected to move so again. Then
the batches that are fetched ahead are made under the expected state, and thrown away if it comes out otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.dataio.witness import callable_code

Path = tuple[tuple[str, Any], ...]
"""How to reach a leaf from the dataset on: ("attribute", name), ("item", key), or ("entry", place) of a tuple."""

_DEPTH = 4
_WIDTH = 256
_SCALARS = (int, float, bool, str, bytes, complex, type(None))


class State(NamedTuple):
    """A dataset's small state: what can be sent, by path, and a fingerprint of the rest."""

    leaves: dict[Path, Any]
    rest: dict[Path, Hashable]


def state_of(dataset: Any) -> State:
    """Return the small state of `dataset`."""
    state = State({}, {})
    _look(dataset, (), _DEPTH, state)
    return state


def _look(thing: Any, path: Path, depth: int, state: State) -> None:
    if isinstance(thing, _SCALARS):
        state.leaves[path] = thing
    elif isinstance(thing, torch.Generator):
        state.rest[path] = ("torch", thing.get_state().numpy().tobytes())
    elif isinstance(thing, random.Random):
        state.rest[path] = ("random", hash(thing.getstate()))
    elif hasattr(thing, "bit_generator"):
        state.rest[path] = ("numpy", repr(thing.bit_generator.state))
    elif isinstance(thing, Tensor):
        state.rest[path] = ("tensor", id(thing), thing._version)
    else:
        _look_inside(thing, path, depth, state)


def _look_inside(thing: Any, path: Path, depth: int, state: State) -> None:
    if isinstance(thing, dict):
        state.rest[path] = ("dict", id(thing), len(thing))
        if depth and len(thing) <= _WIDTH:
            for key, value in thing.items():
                _look(value, (*path, ("item", key)), depth - 1, state)
    elif isinstance(thing, list | tuple):
        state.rest[path] = (type(thing).__name__, id(thing), len(thing))
        kind = "item" if isinstance(thing, list) else "entry"
        if depth and len(thing) <= _WIDTH:
            for place, value in enumerate(thing):
                _look(value, (*path, (kind, place)), depth - 1, state)
    else:
        attributes = getattr(thing, "__dict__", None)
        state.rest[path] = ("object", id(thing))
        if depth and isinstance(attributes, dict) and not isinstance(thing, type) and not callable_code(thing):
            for name, value in attributes.items():
                _look(value, (*path, ("attribute", name)), depth - 1, state)


class Change(NamedTuple):
    """What became of a dataset: the leaves that differ, and whether they are all that differs."""

    leaves: dict[Path, Any]
    sendable: bool

    def __bool__(self) -> bool:
        return bool(self.leaves) or not self.sendable


def compare(old: State, new: State) -> Change:
    """Return what has to be sent to a copy in state `old` to bring it to `new`."""
    changed = {path: value for path, value in new.leaves.items() if path not in old.leaves or old.leaves[path] != value}
    gone = any(path not in new.leaves for path in old.leaves)
    frozen = any(not path or path[-1][0] == "entry" for path in changed)
    return Change(changed, old.rest == new.rest and not gone and not frozen)


def apply_leaves(dataset: Any, leaves: dict[Path, Any]) -> None:
    """Set the values in a copy of the dataset."""
    for path, value in leaves.items():
        target = dataset
        for kind, name in path[:-1]:
            target = getattr(target, name) if kind == "attribute" else target[name]
        kind, name = path[-1]
        if kind == "attribute":
            setattr(target, name, value)
        else:
            target[name] = value


class Forecast:
    """Expect a dataset's next state from how it moved between the last epochs."""

    def __init__(self) -> None:
        self._steps: dict[Path, float] = {}

    def saw(self, old: State, new: State) -> None:
        """Take note of how the dataset moved from one epoch's beginning to the next one's."""
        self._steps = {
            path: value - old.leaves[path]
            for path, value in new.leaves.items()
            if type(value) is int and type(old.leaves.get(path)) is int and value != old.leaves[path]
        }

    def next(self, now: State) -> State:
        """Return the state that is expected when the next epoch begins."""
        moved = {path: now.leaves[path] + step for path, step in self._steps.items() if path in now.leaves}
        return State({**now.leaves, **moved}, now.rest)
