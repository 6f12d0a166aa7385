"""Steps with a closure: `optimizer.step(closure)` makes the forward and the backward pass itself, as in Lightning.

A hook before such a step sees the gradients of the step before, or none; what looks at gradients has to wait until the
closure has run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias, TypeGuard

from torch import nn

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named, as a pre-hook of `Optimizer.step` gets and may return them."""


def followed_by(act: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Return a step's arguments with a closure that ends with an action; None if it has no closure.

    A module is no closure, although it can be called: an optimizer that is given one wants more of it.

    Args:
        act: called each time that the closure has run.
        args: of the step, the optimizer first.
        kwargs: of the step.

    Example:
        >>> args, kwargs = followed_by(lambda: print("gradients are there"), (None, lambda: 0.5), {})
        >>> args[1]()
        gradients are there
        0.5
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
