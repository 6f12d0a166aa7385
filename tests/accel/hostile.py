"""Reports whose every text and every number is one that may do harm, whatever fields there are."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def filled(target: type[T], text: str = "<script>alert(1)</script>", number: float = 1.0, depth: int = 2) -> T:
    """Return a report with this text and this number in each field, but for its kind and schema."""
    hints = typing.get_type_hints(target)
    names = [field.name for field in dataclasses.fields(target) if field.name not in {"kind", "schema"}]  # type: ignore[arg-type]
    return target(**{name: _value(hints[name], text, number, depth) for name in names})


def _value(kind: Any, text: str, number: float, depth: int) -> Any:
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _value(next(option for option in options if option is not type(None)), text, number, depth)
    if origin is list:
        return [_value(options[0], text, number, depth - 1) for _ in range(2 * (depth > 0))]
    if origin is dict:
        return {text: _value(options[1], text, number, depth), "other": _value(options[1], text, number, depth)}
    if dataclasses.is_dataclass(kind):
        return filled(typing.cast("type[Any]", kind), text, number, depth)
    return {int: 3, float: number, bool: True}.get(kind, text)
