"""JSON read into dataclasses: each value is checked against the annotation of its field."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Collection
from functools import cache
from typing import Any, TypeVar

from accel.profiler.errors import InvalidArgument

T = TypeVar("T")


class UnreadableJson(InvalidArgument):
    """A text is no JSON, or a value is not of the declared type; the message says where, and what was expected."""


def decode(text: str) -> Any:
    """Return what a JSON text stands for.

    Raises:
        UnreadableJson: if it is no JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableJson(f"it must be JSON, it is not: {error}") from None


def read(target: type[T], value: Any, where: str, *, required: Collection[str] = ()) -> T:
    """Check decoded JSON against a dataclass, and against those that its fields hold, and build it.

    Args:
        target: a dataclass.
        value: decoded JSON.
        where: what `value` is, for the message of an error.
        required: fields that must be there although they have a default.

    Raises:
        UnreadableJson: if a field is missing, unknown or of another type.
    """
    try:
        return typing.cast("T", _object(target, value, where, frozenset(required)))
    except (OverflowError, RecursionError) as error:
        raise UnreadableJson(f"{where} holds a value that no {where} has: {error}") from None


def _value(target: Any, value: Any, where: str) -> Any:
    origin, options = typing.get_origin(target), typing.get_args(target)
    if target is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        (option,) = (option for option in options if option is not type(None))
        return None if value is None else _value(option, value, where)
    if origin is typing.Literal:
        _require(value in options, where, f"one of {', '.join(map(repr, options))}", value)
        return value
    if origin is list:
        _require(isinstance(value, list), where, "a list", value)
        return [_value(options[0], item, f"{where}[{n}]") for n, item in enumerate(value)]
    if origin is dict:
        _require(isinstance(value, dict), where, "an object", value)
        return {key: _value(options[1], item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(target):
        return _object(target, value, where)
    if target is float:
        _require(isinstance(value, int | float) and not isinstance(value, bool), where, "a number", value)
        return float(value)
    is_of_type = isinstance(value, target) and (target is bool or not isinstance(value, bool))
    _require(is_of_type, where, target.__name__, value)
    return value


def _object(target: Any, value: Any, where: str, required: frozenset[str] = frozenset()) -> Any:
    _require(isinstance(value, dict), where, "an object", value)
    annotations, without_default = _fields(target)
    unknown = sorted(set(value) - set(annotations))
    _require(not unknown, where, f"without {unknown}", value)
    missing = sorted((without_default | required) - set(value))
    if missing:
        raise UnreadableJson(f"{where} is incomplete: it lacks {', '.join(missing)}")
    return target(**{name: _value(annotations[name], item, f"{where}.{name}") for name, item in value.items()})


@cache
def _fields(target: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the annotations of a dataclass, and its fields without a default."""
    annotations = typing.get_type_hints(target)
    absent = dataclasses.MISSING
    fields = dataclasses.fields(target)
    without_default = frozenset(f.name for f in fields if f.default is absent and f.default_factory is absent)
    return {f.name: annotations[f.name] for f in fields}, without_default


def _require(is_met: bool, where: str, expected: str, value: Any) -> None:
    if not is_met:
        raise UnreadableJson(f"{where} must be {expected}, got {str(value)[:60]!r}")
