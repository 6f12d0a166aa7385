"""Other tensors in the arguments of a call, within the very dicts, lists and dataclasses that the loop passes.

Copies of these would hide from the loop what the call writes into them, as in `batch["image"] = normalised`.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable
from typing import Any

from torch import Tensor

from accel.profiler.trees import map_tensors, with_entries


class ExchangedArguments:
    """Put other tensors in the place of the loop's own, for one call.

    Args:
        exchange: returns what the call gets for a tensor; the tensor itself where that is fine.
        back: returns what the loop gets for a tensor that the call has put into one of its containers.

    Attributes:
        pairs: the loop's tensors that were exchanged, with what the call gets.
    """

    def __init__(self, exchange: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> None:
        self._exchange, self._back = exchange, back
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self._given: dict[int, tuple[Any, Any]] = {}
        """What the loop has passed, and what the call gets for it, by the former's id."""
        self._own: dict[int, Any] = {}
        """What the loop has passed, by the id of what the call gets for it."""
        self._before: list[tuple[Any, list[tuple[Any, Any]]]] = []
        """The loop's containers, and the entries that they had."""

    def put_in(self, value: Any) -> Any:
        """Return arguments for the call: the loop's containers are the same objects, and hold other tensors.

        Args:
            value: arguments of the call, or a part of them.
        """
        if id(value) in self._given:  # twice among the arguments, or a link to what it is a part of
            return self._given[id(value)][1]
        held = _held(value)
        if held is not None:
            self._given[id(value)] = value, value
            self._put_into(held)
            return value
        if isinstance(value, Tensor):
            other: Any = self._exchange(value)
            if other is not value:
                self.pairs.append((value, other))
        elif isinstance(value, tuple):
            other = with_entries(value, [self.put_in(entry) for entry in value])
        else:
            other = map_tensors(self.put_in, value)
        self._given[id(value)] = value, other
        self._own[id(other)] = value
        return other

    def _put_into(self, held: Any) -> None:
        before = _entries(held)
        self._before.append((held, before))
        for key, entry in before:
            other = self.put_in(entry)
            if other is not entry:
                held[key] = other

    def take_out(self) -> None:
        """Put the loop's own tensors back into its containers, and what the call has put there as the loop knows it."""
        for held, before in self._before:
            known = {id(entry) for _, entry in before}
            for key, entry in _entries(held):
                own = self._own.get(id(entry), entry)
                if own is entry and id(entry) not in known:
                    own = map_tensors(self.returned, entry)
                if own is not entry:
                    held[key] = own

    def returned(self, tensor: Tensor) -> Tensor:
        """Return the loop's own tensor for one that was exchanged for it; for another one what `back` does.

        Args:
            tensor: that the call has put into a container.
        """
        own: Tensor | None = self.own(tensor)
        return self._back(tensor) if own is None else own

    def own(self, tensor: Tensor) -> Tensor | None:
        """Return the loop's own tensor that the call got this one for; None if it comes from elsewhere.

        Args:
            tensor: that the call returns, say.
        """
        return self._own.get(id(tensor))


def _held(value: Any) -> Any:
    """Return the list or dict in which a container has its entries; None if it is no such container."""
    if isinstance(value, list | dict):
        return value
    if isinstance(value, UserDict):
        return value.data
    # Also of a frozen dataclass, which is what it was when the call has ended.
    is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return getattr(value, "__dict__", None) if is_instance else None


def _entries(held: Any) -> list[tuple[Any, Any]]:
    return list(enumerate(held)) if isinstance(held, list) else list(held.items())
