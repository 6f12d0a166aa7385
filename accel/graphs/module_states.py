"""What a recording has done to the attributes and buffers of modules, which Python has put there once.

A replay runs no Python, so it is the caller who puts there what the recorded call has left. A tensor that each call
replaces may be read by the next one, as the state of a recurrent network is: then a graph would read the first one's
for ever. Whether it is read shows when it is hidden while the call is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from torch import Tensor, nn

from accel.errors import AccelError
from accel.graphs.owners import Place, holds_tensors, is_looked_at

MISSING = object()


class LeftBehind(AccelError):
    """A recorded function leaves something that later calls need, and that no replay would leave there."""


class LeftValue:
    """What a recorded call has put into a module.

    Args:
        where: the dictionary of the module.
        name: in it.
        value: that the call has left; `MISSING` if it has taken away what was there.
        before: what stood there.
    """

    def __init__(self, where: dict[str, Any], name: str, value: Any, before: Any) -> None:
        self.name, self.value = name, value
        self.holds_tensors, self.held_tensors = holds_tensors(value), holds_tensors(before)
        self._where = where

    @property
    def place(self) -> Place:
        """Where it stands."""
        return id(self._where), self.name

    def put(self) -> None:
        """Leave it there again, after a replay."""
        if self.value is MISSING:
            self._where.pop(self.name, None)
        else:
            self._where[self.name] = self.value


class ModuleStates:
    """The attributes, parameters and buffers of modules as they were when this was made.

    Args:
        modules: with all inside of them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        dicts: list[dict[str, Any]] = [d for each in modules for d in (vars(each), each._parameters, each._buffers)]
        self._before = [(d, dict(d)) for d in dicts]

    def hide(self, places: Iterable[Place]) -> None:
        """Let what stands there raise when it is used."""
        hidden = set(places)
        for d, before in self._before:
            for name in before:
                if (id(d), name) in hidden and holds_tensors(d[name]):
                    d[name] = _Hidden(name)

    def show(self) -> None:
        """Put back what was hidden, and has not been replaced."""
        for d, before in self._before:
            for name in [name for name, value in d.items() if type(value) is _Hidden]:
                d[name] = before[name]

    def left(self) -> list[LeftValue]:
        """Return the numbers, words and tensors that have been put there since, in the place of others."""
        changed = [(d, name, d.get(name, MISSING), before) for d, name, before in self._changed()]
        return [LeftValue(d, name, now, was) for d, name, now, was in changed if now is MISSING or is_looked_at(now)]

    def put_back(self) -> None:
        """Make the modules what they were, but for what was written in place."""
        changed = {id(d) for d, _, _ in self._changed()}
        for d, before in self._before:
            if id(d) in changed:
                d.clear()
                d.update(before)

    def _changed(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Yield (dictionary, name, what stood there) of all that is another object now."""
        for d, before in self._before:
            for name in {**before, **d}:
                now, known = d.get(name, MISSING), before.get(name, MISSING)
                if now is not known and not _is_same_value(now, known):
                    yield d, name, known


class _Hidden:
    """Stands where a tensor was, and raises when it is used."""

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def __getattribute__(self, name: str) -> NoReturn:
        _raise(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        given = (*args, *(kwargs or {}).values())
        flat = [item for each in given for item in (each if isinstance(each, tuple | list) else [each])]
        _raise(next(each for each in flat if type(each) is _Hidden))


def _raise(hidden: _Hidden, *_: Any) -> NoReturn:
    name = object.__getattribute__(hidden, "_name")
    raise LeftBehind(
        f"a call reads the tensor in {name!r} that the call before it has put there, and replays put none there; "
        "write to it in place (copy_)"
    )


# Python looks these up in the class, past __getattribute__.
for _operator in ("add", "sub", "mul", "truediv", "matmul", "pow", "floordiv", "mod", "and", "or", "xor"):
    setattr(_Hidden, f"__{_operator}__", _raise)
    setattr(_Hidden, f"__r{_operator}__", lambda self, _: _raise(self))
for _operator in ("bool", "len", "iter", "getitem", "setitem", "neg", "invert", "float", "int", "eq", "ne", "lt", "gt"):
    setattr(_Hidden, f"__{_operator}__", _raise)


def _is_same_value(now: Any, before: Any) -> bool:
    return type(now) in (bool, int, float, str) and type(now) is type(before) and bool(now == before)


def gradients_beside(left: list[LeftValue]) -> str:
    """Return the name of a tensor with gradients among what was left, '' if there is none."""
    return next((each.name for each in left if _needs_gradients(each.value)), "")


def _needs_gradients(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_needs_gradients, value))
    return isinstance(value, Tensor) and value.requires_grad and value.grad_fn is not None
