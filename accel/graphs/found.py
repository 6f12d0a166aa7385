"""Which models and optimizers a function refers to, found without running it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def found(function: Callable[..., Any]) -> tuple[list[nn.Module], list[Optimizer]]:
    """Return the modules and optimizers that a function refers to: closure, globals, its object, bound arguments.

    Decorators are looked through, and lists, tuples and dicts are looked into. Functions that it calls are not read,
    but for those in its closure.

    Args:
        function: a function, a method, a partial or another object that can be called.
    """
    modules: dict[int, nn.Module] = {}
    optimizers: dict[int, Optimizer] = {}
    for value in _referred(function, set()):
        for item in (value, *_items(value)):
            if isinstance(item, nn.Module):
                modules[id(item)] = item
            elif isinstance(item, Optimizer):
                optimizers[id(item)] = item
    return list(modules.values()), list(optimizers.values())


def _referred(function: Any, seen: set[int]) -> Iterator[Any]:
    """Yield what a function refers to; `seen` are those that were read before, as they may refer to each other."""
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())
        yield from _referred(function.func, seen)
    elif isinstance(function, types.MethodType):
        yield from _of_object(function.__self__, seen)
        yield from _referred(function.__func__, seen)
    elif isinstance(function, types.FunctionType):
        yield from _of_function(function, seen)
    else:
        yield from _of_object(function, seen)
        call = getattr(type(function), "__call__", None)  # noqa: B004  (an object's call has globals of its own)
        if isinstance(call, types.FunctionType) and not isinstance(function, nn.Module):
            yield from _referred(call, seen)


def _of_function(function: types.FunctionType, seen: set[int]) -> Iterator[Any]:
    if (wrapped := getattr(function, "__wrapped__", None)) is not None:
        yield from _referred(wrapped, seen)
    for cell in function.__closure__ or ():
        value = _content(cell)
        yield value
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):  # what a decorator has wrapped
            yield from _referred(value, seen)
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield function.__globals__[name]


def _of_object(value: Any, seen: set[int]) -> Iterator[Any]:
    yield value
    if not isinstance(value, nn.Module | torch.Tensor):
        yield from getattr(value, "__dict__", {}).values()
        if (wrapped := getattr(value, "__wrapped__", None)) is not None:
            yield from _referred(wrapped, seen)


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names in a code, and in those of comprehensions, lambdas and functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _items(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else ()
