"""An object that answers as another one: attributes, operators, containers' methods, all but what a subclass keeps.

Python looks special methods up on the type, so a stand-in for a list must be of a type that has those of a list, and
one for a generator of a type that has none of them. Each type of loader gets a type of stand-ins of its own.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable
from typing import Any

_KEPT = frozenset(
    f"__{name}__"
    for name in (
        # How it is made, reached and taken down,
        *("new", "init", "del", "init_subclass", "subclasshook", "class_getitem", "prepare", "release_buffer"),
        *("class", "getattribute", "getattr", "setattr", "delattr", "annotate", "annotate_func"),
        # and copied: a copy is one of the plain object.
        *("reduce", "reduce_ex", "getstate", "setstate", "getnewargs", "getnewargs_ex", "copy", "deepcopy"),
        # A subclass says what it shows and iterates,
        *("repr", "iter"),
    )
)
"""Special methods that are the stand-in's own."""
_types: weakref.WeakKeyDictionary[type, weakref.WeakValueDictionary[type, type]] = weakref.WeakKeyDictionary()


class StandIn:
    """Answer as `loader`, whose special methods its type has.

    Args:
        loader: what it stands for.
    """

    __slots__ = ("__weakref__", "_accel_loader")

    def __new__(cls, loader: Any, *args: Any) -> Any:
        return object.__new__(_type_for(cls, type(loader)))

    def __init__(self, loader: Any) -> None:
        object.__setattr__(self, "_accel_loader", loader)

    # isinstance(stand_in, DataLoader) holds wherever it held before.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._accel_loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_accel_loader"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_accel_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._accel_loader, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._accel_loader, name)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process gets the plain loader.
        return _same_object, (self._accel_loader,)

    def __copy__(self) -> Any:
        return copy.copy(self._accel_loader)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._accel_loader, memo)


def _same_object(thing: Any) -> Any:
    return thing


def is_stand_in(thing: Any) -> bool:
    """Return whether `thing` is a stand-in (its `__class__` is that of the loader it stands for)."""
    return issubclass(type(thing), StandIn)


def _plain(thing: Any) -> Any:
    return thing._accel_loader if is_stand_in(thing) else thing


def _type_for(base: type, kind: type) -> type:
    """Return the subclass of `base` whose instances stand for those of `kind`."""
    known = _types.setdefault(kind, weakref.WeakValueDictionary())
    stand_in = known.get(base)
    if stand_in is None:
        # Errors name an object's type: they are the same as the plain loader's.
        names = {"__slots__": (), "__module__": __name__, "__qualname__": f"{base.__name__}[{kind.__qualname__}]"}
        methods = _methods(kind)
        if "__next__" in methods and hasattr(base, "_accel_next"):  # and what it hands out next
            methods["__next__"] = base._accel_next
        stand_in = known[base] = type(kind.__name__, (base,), {"__doc__": kind.__doc__, **names, **methods})
    return stand_in


def _methods(kind: type) -> dict[str, Any]:
    """Return the special methods that forward to those of `kind`."""
    own = {name: value for base in reversed(kind.__mro__[:-1]) for name, value in vars(base).items()}
    own = {**{name: getattr(kind, name) for name in ("__eq__", "__ne__", "__hash__")}, **own}
    methods: dict[str, Any] = {}
    for name, value in own.items():
        if not (name.startswith("__") and name.endswith("__")) or name in _KEPT:
            continue
        if value is None:  # such as the hash of a list: there is none
            methods[name] = None
        elif callable(value):
            methods[name] = _forwarding(name)
    return methods


def _forwarding(name: str) -> Callable[..., Any]:
    """Return the special method `name` that asks the loader, as Python would."""
    ask = vars(operator).get(name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        loader, args = self._accel_loader, tuple(map(_plain, args))
        result = _special(loader, name)(*args, **kwargs) if ask is None else ask(loader, *args, **kwargs)
        return self if result is loader else result  # `+=` and `with` hand on the one that is listened to

    return method


def _special(loader: Any, name: str) -> Any:
    """Return a special method of the loader, looked up on its type as Python does."""
    method = next(vars(base)[name] for base in type(loader).__mro__ if name in vars(base))
    return method.__get__(loader, type(loader)) if hasattr(type(method), "__get__") else method
