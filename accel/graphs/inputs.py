"""What a graph is captured for: the structure of the arguments, and how each tensor lies in memory.

torch copies a new input into a graph's own with `copy_`, which broadcasts: an input of [1, C] silently fills one of
[B, C]. Here each such description has a graph of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.errors import InvalidType

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, Enum)


class TensorForm(NamedTuple):
    """How a tensor lies in memory."""

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: torch.device
    requires_grad: bool

    def __str__(self) -> str:
        grad = ", requires grad" if self.requires_grad else ""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)} on {self.device}{grad}"


class _Sequence(NamedTuple):
    kind: type
    items: tuple[Hashable, ...]


class _Mapping(NamedTuple):
    kind: type
    items: tuple[tuple[Hashable, Hashable], ...]


class _Value(NamedTuple):
    kind: type  # True, 1 and 1.0 are equal, and no two of them the same argument
    value: Hashable


_REMEDY = "let the function find other objects itself"


def described(value: Any, tensors: list[Tensor], what: str, remedy: str = _REMEDY) -> Hashable:
    """Describe a value, and add its tensors to a list, in order.

    Args:
        value: tensors, numbers, words, None, or tuples, lists and dicts of them.
        what: the value is, for the message.

    Raises:
        InvalidType: for anything else: a graph would go on with what it was at the capture.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return TensorForm(value.shape, value.dtype, value.stride(), value.device, value.requires_grad)
    if isinstance(value, tuple | list):
        return _Sequence(type(value), tuple(described(item, tensors, what, remedy) for item in value))
    if isinstance(value, dict):
        items = tuple((key, described(item, tensors, what, remedy)) for key, item in value.items())
        return _Mapping(type(value), items)
    if isinstance(value, _PLAIN):
        return _Value(type(value), value)
    raise InvalidType(
        f"capture: {what} must be tensors, numbers, words, None, or tuples, lists and dicts of them. "
        f"Found: {type(value).__name__}; {remedy}"
    )


def rebuilt(description: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a value of this description, with these tensors."""
    if isinstance(description, TensorForm):
        return next(tensors)
    if isinstance(description, _Sequence):
        items = [rebuilt(item, tensors) for item in description.items]
        return description.kind(*items) if hasattr(description.kind, "_fields") else description.kind(items)
    if isinstance(description, _Mapping):
        return description.kind((key, rebuilt(item, tensors)) for key, item in description.items)
    return description.value


def difference(known: Any, new: Any, at: str = "") -> str:
    """Say where two descriptions differ first, '' if they don't."""
    if known == new:
        return ""
    if type(known) is type(new) and isinstance(known, _Sequence | _Mapping) and len(known.items) == len(new.items):
        pairs = enumerate(zip(known.items, new.items, strict=True))
        for number, (one, other) in pairs:
            if isinstance(known, _Mapping):
                number, one, other = one[0], one[1], other[1]  # type: ignore[index]
            if text := difference(one, other, f"{at}[{number!r}]"):
                return text
    return f"{at or 'value'}: {_words(known)} → {_words(new)}"


def _words(description: Any) -> str:
    if isinstance(description, TensorForm):
        return str(description)
    if isinstance(description, _Sequence | _Mapping):
        return f"{description.kind.__name__} of {len(description.items)}"
    return repr(description.value)
