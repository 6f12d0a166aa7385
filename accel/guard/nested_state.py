"""Lists, dicts, sets and deques, also within each other, and the tensors in them: kept and put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

MOST_BYTES = 2**28
"""Of tensors that are copied for one state; those beyond are not put back."""
_MOST_ENTRIES = 100_000
"""Entries of containers that are looked into: an attribute may be a whole data set."""
_MOST_FOR_EACH_CALL = 1000
"""Entries that are noted before each call, where its own changes are put back if it is made again."""
_CONTAINERS = (list, dict, set, deque)
_PLAIN = (Tensor, nn.Parameter)

Contents = list[tuple[Any, list[Any]]]
"""Containers with their entries."""


class NestedState:
    """Values that a call may change in place.

    Args:
        values: where to look.
        apart: tensors that are others' to keep, such as weights; what lies in their memory is left out.
    """

    def __init__(self, values: Iterable[Any], apart: Iterable[Tensor]) -> None:
        self._contents: Contents = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._apart = {_memory(tensor) for tensor in apart if type(tensor) in _PLAIN}
        self._bytes_left, self._entries_left = MOST_BYTES, _MOST_ENTRIES
        seen: set[int] = set()
        waiting = deque(values)
        while waiting:
            value = waiting.popleft()
            if isinstance(value, (*_CONTAINERS, tuple, Tensor)) and id(value) not in seen:
                seen.add(id(value))
                waiting.extend(self._keep(value))

    def _keep(self, value: Any) -> Iterable[Any]:
        """Keep one value, and return what is to be looked at within it."""
        if isinstance(value, Tensor):
            self._keep_tensor(value)
            return ()
        if isinstance(value, _CONTAINERS):
            self._contents.append((value, _entries(value)))
        inner = value.values() if isinstance(value, dict) else value
        self._entries_left -= len(inner)
        return () if isinstance(value, set) or self._entries_left < 0 else list(inner)

    def _keep_tensor(self, tensor: Tensor) -> None:
        if not _is_written_in_place(tensor) or tensor.nbytes > self._bytes_left or _memory(tensor) in self._apart:
            return
        self._bytes_left -= tensor.nbytes
        self._tensors.append((tensor, tensor.detach().clone()))

    def changed(self) -> tuple[set[int], list[Tensor]]:
        """Return the ids of the containers that have got other entries since, and the tensors that were written to."""
        containers = {id(each) for each, entries in self._contents if not _are_same(_entries(each), entries)}
        pairs = self._tensors
        return containers, [t for t, value in pairs if t.shape != value.shape or not torch.equal(t, value)]

    def restore(self) -> None:
        """Put back what has changed, into the same objects; the rest is not written."""
        put_back(self._contents)
        for tensor, value in self._tensors:
            if tensor.shape != value.shape:
                tensor.data = value.clone()
            elif not torch.equal(tensor, value):
                tensor.data.copy_(value)  # its version is that of the graphs there may be


def entries_within(value: Any) -> Contents:
    """Return the containers within a value, itself first, with their entries; those beyond a thousand are left out.

    Args:
        value: of any kind.
    """
    contents: Contents = []
    waiting, seen, entries_left = deque([value]), set[int](), _MOST_FOR_EACH_CALL
    while waiting:
        each = waiting.popleft()
        if not isinstance(each, (*_CONTAINERS, tuple)) or id(each) in seen:
            continue
        seen.add(id(each))
        entries_left -= len(each)
        if entries_left < 0:
            break
        if isinstance(each, _CONTAINERS):
            contents.append((each, _entries(each)))
        if not isinstance(each, set):
            waiting.extend(each.values() if isinstance(each, dict) else each)
    return contents


def as_now(contents: Contents) -> Contents:
    """Return the same containers with the entries that they have now.

    Args:
        contents: containers with entries that they had.
    """
    return [(container, _entries(container)) for container, _ in contents]


def put_back(contents: Contents) -> None:
    """Give containers the entries again that they had.

    Args:
        contents: the containers with these.
    """
    for container, entries in contents:
        if not _are_same(_entries(container), entries):
            _refill(container, entries)


def _is_written_in_place(tensor: Tensor) -> bool:
    """Return whether a tensor may be state: not a result that has a graph, or one that an optimizer moves."""
    if type(tensor) not in _PLAIN or tensor.requires_grad or tensor.is_inference():
        return False
    plain = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_meta or tensor.is_nested)
    return plain and 0 not in tensor.stride()  # an expanded one can't be written to


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _entries(container: Any) -> list[Any]:
    return list(container.items()) if isinstance(container, dict) else list(container)


def _refill(container: Any, entries: list[Any]) -> None:
    container.clear()
    if isinstance(container, dict):
        for key, value in entries:  # not by update(): a Counter's adds up
            container[key] = value
    else:
        (container.update if isinstance(container, set) else container.extend)(entries)


def _are_same(now: list[Any], before: list[Any]) -> bool:
    """Return whether entries are the same objects; a dict's are pairs, made anew each time."""
    if len(now) != len(before):
        return False
    return all(a is b or _is_same_pair(a, b) for a, b in zip(now, before, strict=True))


def _is_same_pair(a: Any, b: Any) -> bool:
    is_pair = type(a) is tuple and type(b) is tuple and len(a) == len(b) == 2
    return is_pair and a[0] is b[0] and a[1] is b[1]
