"""Record a function that may leave something in modules: once more where it replaces a tensor, with that one hidden."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from accel.graphs.module_states import LeftBehind, LeftValue, ModuleStates, gradients_beside
from accel.graphs.owners import Owners

_T = TypeVar("_T")
_ATTEMPTS = 3


@dataclass
class Recorded(Generic[_T]):
    """A recording."""

    made: _T
    left: list[LeftValue]
    """What it has put into modules."""
    key: Any
    """What it was made for, as things stood when it began."""


def recorded(
    owners: Owners,
    arguments: Hashable,
    key: Callable[[], Any],
    record: Callable[[], _T],
    undo: Callable[[_T], None],
    *,
    is_whole: bool,
) -> Recorded[_T]:
    """Record a function; where that fails, modules are as they were.

    Args:
        owners: have the modules, and are told what such calls only write to.
        arguments: describe those of the call.
        key: returns what a recording is made for, with what owners have been told.
        record: records the function.
        undo: undoes a recording.
        is_whole: whether the backward pass is in it, so that tensors with gradients may be left for it.

    Raises:
        LeftBehind: if the function reads what the call before it has left, or leaves gradients to others.
    """
    states = ModuleStates(owners.modules_within())
    hidden = owners.overwritten(arguments)
    for _ in range(_ATTEMPTS):
        made_for = key()
        states.hide(hidden)
        try:
            made = record()
            states.show()
            left = states.left()
            if not is_whole and (name := gradients_beside(left)):
                raise LeftBehind(f"it leaves a tensor with gradients in {name!r}, beside what it returns; return it")
        except BaseException:
            states.put_back()
            raise
        new = {each.place for each in left if each.holds_tensors} - hidden
        hidden |= new
        if not any(each.place in new and each.held_tensors for each in left):
            return Recorded(made, left, made_for)
        undo(made)
        states.put_back()
    raise LeftBehind("it leaves a tensor in another attribute of a module each time it is recorded")
