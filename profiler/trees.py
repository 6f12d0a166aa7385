"""Trees of tensors, such as a batch, or the arguments and the results of a call.

Nodes are tuples (named ones too), lists, mappings and dataclasses, of any class.
`torch.utils._pytree` knows only exact classes and those that someone has registered, makes all
containers anew, and takes twice as long for a pair of tensors.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(tree, Tensor | str | bytes):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from leaves(value)
    elif is_dataclass(tree):
        for field in dataclasses.fields(tree):
            if hasattr(tree, field.name):  # one with init=False may be set later
                yield from leaves(getattr(tree, field.name))
    else:
        yield tree


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, in order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return a tree with a function applied to each tensor; the structure and its classes stay.

    What holds no tensor that changed is returned as the very same object.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, tuple | list):
        values = [map_tensors(function, value) for value in tree]
        if isinstance(tree, PackedSequence):
            values[1] = tree.batch_sizes  # which stay on the CPU
        return with_entries(tree, values)
    if not isinstance(tree, Mapping) and not is_dataclass(tree):
        return tree
    old = _named(tree)
    new = {name: map_tensors(function, value) for name, value in old.items()}
    changed = {name: value for name, value in new.items() if value is not old[name]}
    return _with(tree, changed) if changed else tree


def copied(tree: Any) -> Any:
    """Return a tree with copies of its tensors, in containers of its own: a call may write to both.

    Lists, dicts, sets, deques and dataclasses keep their class, a `defaultdict` its factory. What else there is, such
    as an object of another class, is the same.
    """
    if isinstance(tree, Tensor):
        return tree.detach().clone().requires_grad_(tree.requires_grad)
    if isinstance(tree, tuple):
        return with_entries(tree, list(map(copied, tree)))
    if isinstance(tree, list | deque | set | dict | UserDict) or (
        is_dataclass(tree) and not isinstance(tree, nn.Module)
    ):
        with contextlib.suppress(TypeError, AttributeError):  # one that can't be copied, or written to
            return _copy(tree)
    return map_tensors(copied, tree)


def _copy(tree: Any) -> Any:
    made = copy.copy(tree)
    if isinstance(tree, list):
        made[:] = map(copied, tree)
    elif isinstance(tree, deque):
        made.clear()
        made.extend(map(copied, tree))
    elif not isinstance(tree, set):
        for name, value in _named(tree).items():
            _set(made, name, copied(value))
    return made


def with_entries(sequence: Any, entries: list[Any]) -> Any:
    """Return a tuple or list of the same class with other entries; the very same object where none is another."""
    if all(new is old for new, old in zip(entries, sequence, strict=True)):
        return sequence
    if isinstance(sequence, list) and type(sequence) is not list:
        made = copy.copy(sequence)  # with attributes of its own
        made[:] = entries
        return made
    return type(sequence)(*entries) if hasattr(sequence, "_fields") else type(sequence)(entries)


def is_dataclass(value: Any) -> bool:
    """Return whether a value is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def shape_of(tensor: Tensor) -> torch.Size:
    """Return a tensor's shape; of a nested one, which has none, how many it holds and how many elements these have."""
    return torch.Size((tensor.size(0), tensor.numel())) if tensor.is_nested else tensor.shape


def _named(tree: Any) -> dict[Any, Any]:
    """Return the entries of a mapping, or what stands in a dataclass: its fields, and attributes beside them."""
    if isinstance(tree, Mapping):
        return dict(tree)
    names = dict.fromkeys([*(each.name for each in dataclasses.fields(tree)), *getattr(tree, "__dict__", ())])
    return {name: getattr(tree, name) for name in names if hasattr(tree, name)}


def _with(tree: Any, changed: dict[Any, Any]) -> Any:
    """Return a copy of a mapping or a dataclass in which some entries are others."""
    if type(tree) is dict:
        return {**tree, **changed}
    try:
        made = copy.copy(tree)  # what __post_init__ did is done
        for name, value in changed.items():
            _set(made, name, value)
    except TypeError:  # a mapping that can't be copied, or written to
        return type(tree)({**tree, **changed})
    return made


def _set(tree: Any, name: Any, value: Any) -> None:
    if isinstance(tree, Mapping):
        tree[name] = value  # type: ignore[index]
    else:
        object.__setattr__(tree, name, value)  # of a frozen dataclass too
