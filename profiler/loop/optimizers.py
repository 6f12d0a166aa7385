"""The optimizers of a training, none of which is kept alive by who counts on them, and steps with a closure."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeGuard

from torch import nn
from torch.optim import Optimizer


class Optimizers(Sequence[Optimizer]):
    """The optimizers of a model, or of a script, that somebody uses, in the order in which they came.

    None is kept alive by this: one that a loop has replaced, as after a search for the learning rate or at a new stage
    of the training, is freed with its state.

    Attributes:
        appended: how many have come so far, those that are gone too.
        kinds: names of their classes, likewise: in a script with a `main()` none is left at its end.
    """

    def __init__(self, optimizers: Iterable[Optimizer] = ()) -> None:
        self._references: list[weakref.ref[Optimizer]] = []
        self.appended = 0
        self.kinds: set[str] = set(optimizers.kinds) if isinstance(optimizers, Optimizers) else set()
        for optimizer in optimizers:
            self.append(optimizer)

    def append(self, optimizer: Optimizer) -> None:
        """Add one."""
        self._references = [*self._references, weakref.ref(optimizer, self._forget)]
        self.appended += 1
        self.kinds.add(type(optimizer).__name__)

    def _forget(self, reference: weakref.ref[Optimizer]) -> None:
        self._references = [each for each in self._references if each is not reference]

    def __iter__(self) -> Iterator[Optimizer]:
        return map(_referent, self._references)  # without a line of Python for each: it is asked for twice a step

    def __getitem__(self, place: Any) -> Any:
        return list(self)[place]

    def __len__(self) -> int:
        return len(self._references)

    def __bool__(self) -> bool:
        """Return whether there has been one: the loop is one with an optimizer, also between two of them."""
        return self.appended > 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Optimizers | list) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class Strangers:
    """Optimizers that were searched for a model's parameters in vain.

    A `WeakKeyDictionary` and what comes before it took 12 µs at each of a GAN's steps, where code is out of the caches.
    """

    def __init__(self) -> None:
        self._groups: dict[int, tuple[weakref.ref[Optimizer], int]] = {}

    def add(self, optimizer: Optimizer) -> None:
        """Note that none of its groups, as they are now, has a parameter of the model."""
        key, groups = id(optimizer), self._groups
        groups[key] = weakref.ref(optimizer, lambda _: groups.pop(key, None)), len(optimizer.param_groups)

    def __contains__(self, optimizer: Optimizer) -> bool:
        """Return whether it was noted, and has got no group since."""
        noted = self._groups.get(id(optimizer))
        return noted is not None and noted[0]() is optimizer and noted[1] == len(optimizer.param_groups)


_referent: Any = weakref.ref.__call__


Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named, as a pre-hook of `Optimizer.step` gets and may return them."""


def followed_by(act: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Return a step's arguments with a closure that ends with an action; None if it has no closure.

    `optimizer.step(closure)` makes the forward and the backward pass itself, as in Lightning. A hook before such a step
    sees the gradients of the step before, or none; what looks at gradients has to wait until the closure has run.

    A module is no closure, although it can be called: an optimizer that is given one wants more of it.
    """
    if len(args) > 1 and _is_closure(args[1]):
        return (args[0], _followed(args[1], act), *args[2:]), kwargs
    closure = kwargs.get("closure")
    return (args, {**kwargs, "closure": _followed(closure, act)}) if _is_closure(closure) else None


def _is_closure(argument: Any) -> TypeGuard[Callable[..., Any]]:
    return callable(argument) and not isinstance(argument, nn.Module)


def _followed(closure: Callable[..., Any], act: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(closure)
    def run(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        act()
        return loss

    return run
