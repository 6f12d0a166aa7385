"""What a call of a model may change beside the attributes of its modules: what the user's hooks, code and objects keep.

    hooks       of modules and parameters: their closures, and what a method names of its object
    code        of modules' own classes, and functions that it names: the globals that it names,
                and the lists, dicts, sets and deques that stand in these classes
    objects     of the user's own classes, in attributes of modules or reached as above: all their attributes

A list of features that a hook appends to, say, or a counter by which a schedule goes. torch's own code is not looked
into, of other libraries that of hooks only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from accel.dataio.dataset import reach

_MOST = 1000
"""Things that are looked into."""
_OTHERS = (Tensor, nn.Module, Optimizer, DataLoader, Dataset, ModuleType, type)
"""Have a state that is no affair of the call's, or is kept elsewhere."""


class Owner(NamedTuple):
    """Names in a dictionary: attributes of an object, globals of a module; of a closure or a class a copy."""

    attributes: dict[str, Any]
    names: list[str]

    @property
    def values(self) -> list[Any]:
        return [self.attributes[name] for name in self.names]


def owners_beside(model: nn.Module) -> list[Owner]:
    """Return what holds such state, nearest first."""
    owners = [_of_class(kind) for kind in dict.fromkeys(map(type, model.modules()))]
    waiting = deque([*_roots(model), *(value for owner in owners for value in owner.values)])
    seen: dict[int, Any] = {}
    while waiting and len(seen) < _MOST:
        thing = waiting.popleft()
        if id(thing) in seen or isinstance(thing, _OTHERS) or reach.is_scalar(thing):
            continue
        seen[id(thing)] = thing
        own = list(_owners(thing))
        owners += own
        waiting.extend(_entries(thing))
        waiting.extend(value for owner in own for value in owner.values)
    return owners


def _roots(model: nn.Module) -> Iterator[Any]:
    modules, parameters = list(model.modules()), list(model.parameters())
    hooks: list[Any] = [vars(module).get(name) for module in modules for name in _HOOKS]
    hooks += [getattr(each, name, None) for each in parameters for name in ("_backward_hooks", _ACCUMULATED)]
    for each in filter(None, hooks):
        yield from each.values()
    kinds: dict[type, None] = dict.fromkeys(map(type, modules))
    for kind in kinds:
        yield from _code_of(kind)
    for module in modules:
        yield from (value for name, value in vars(module).items() if name not in OF_MODULES)


OF_MODULES = frozenset({*vars(nn.Module()), "_compiled_call_impl"})
"""Attributes of every module, which torch writes."""
_HOOKS = sorted(name for name in OF_MODULES if name.endswith("_hooks") and "state_dict" not in name)
_ACCUMULATED = "_post_accumulate_grad_hooks"


def _code_of(kind: type) -> list[Any]:
    """Return the functions of a class and its bases, as far as they are the user's own."""
    return [value for base in _own(kind) for value in vars(base).values() if isinstance(value, FunctionType)]


def _of_class(kind: type) -> Owner:
    named = {f"{base.__name__}.{name}": value for base in _own(kind) for name, value in vars(base).items()}
    held = {name: value for name, value in named.items() if isinstance(value, list | dict | set | deque)}
    return Owner(held, list(held))


def _own(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if not reach.is_library(base.__module__)]


def _entries(thing: Any) -> Iterable[Any]:
    """Return what a thing holds that has no names."""
    if isinstance(thing, partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, MethodType):
        return [] if _is_of_torch(thing.__func__) else [thing.__func__]
    if isinstance(thing, reach.CONTAINERS):
        return list(islice(thing.values() if isinstance(thing, dict) else thing, reach.LOOKED))
    return []


def _owners(thing: Any) -> Iterator[Owner]:
    if isinstance(thing, FunctionType | MethodType):
        if not _is_of_torch(thing):
            yield from _of_method(thing) if isinstance(thing, MethodType) else _of_function(thing)
    elif (own := reach.own_attributes(thing)) and _is_the_users(type(thing)):
        yield Owner(own, list(own))


def _of_method(method: MethodType) -> Iterator[Owner]:
    own = reach.own_attributes(method.__self__) or {}
    yield Owner(own, sorted(reach.names_of_method(method).all & own.keys()))


def _of_function(function: FunctionType) -> Iterator[Owner]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held = {name: cell.cell_contents for name, cell in cells if _is_set(cell)}
    yield Owner(held, list(held))
    if not reach.is_library(function.__module__ or "builtins"):
        named = reach.names_of(function.__code__).globals & function.__globals__.keys()
        yield Owner(function.__globals__, sorted(named))


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_of_torch(code: Any) -> bool:
    return (getattr(code, "__module__", None) or "").partition(".")[0] in ("accel", "torch")


def _is_the_users(kind: type) -> bool:
    return kind is SimpleNamespace or not reach.is_library(kind.__module__)
