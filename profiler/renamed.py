"""Old public names, which work for one more release and name what has taken their place."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from accel.profiler.errors import InvalidArgument

F = TypeVar("F", bound=Callable[..., Any])


def _warn(old: str, new: str) -> None:
    """Warn of an old name; Python shows it once for each line of a script."""
    warnings.warn(f"accel: {old} is now {new}; the next release drops the old name", FutureWarning, stacklevel=4)


def _decorator(change: Callable[[dict[str, Any], str], None]) -> Callable[[F], F]:
    """Return a decorator that changes the keyword arguments of each call, given the function's name."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*passed: Any, **named: Any) -> Any:
            change(named, function.__qualname__.removesuffix(".__init__"))
            return function(*passed, **named)

        return call  # type: ignore[return-value]

    return decorate


def function(old: str, new: F) -> F:
    """Return a function under its old name."""
    renamed = _decorator(lambda named, name: _warn(f"{old}()", f"{name}()"))(new)
    renamed.__name__ = renamed.__qualname__ = old  # pickled by it
    return renamed


def arguments(**new_names: str) -> Callable[[F], F]:
    """Return a decorator by which keyword arguments may have their old names, given as old name → new name."""

    def change(named: dict[str, Any], owner: str) -> None:
        for old in sorted(new_names.keys() & named.keys()):
            _warn(f"{owner}({old}=)", f"{new_names[old]}=")
            _put(named, new_names[old], named.pop(old), old)

    return _decorator(change)


def gathered(into: str, make: Callable[..., Any], *names: str) -> Callable[[F], F]:
    """Return a decorator for arguments `names` that are fields of one object now, `make`, which `into` takes."""

    def change(named: dict[str, Any], owner: str) -> None:
        if old := {name: named.pop(name) for name in names if name in named}:
            fields = ", ".join(f"{name}=" for name in old)
            _warn(f"{owner}({fields})", f"{into}=accel.{into.capitalize()}({fields})")
            _put(named, into, make(**old), fields.rstrip("="))

    return _decorator(change)


def _put(named: dict[str, Any], new: str, value: Any, old: str) -> None:
    if named.get(new) is not None:
        raise InvalidArgument(f"{new}= must stand alone. Found: {old}= beside it; leave out {old}=")
    named[new] = value
