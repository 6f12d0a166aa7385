"""What a captured function works on beside its arguments: models and optimizers, and what of them a graph freezes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import repeat, starmap
from operator import attrgetter
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel.graphs.obstacles import PLAIN, is_looked_at
from accel.profiler.loop import callslot

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that torch gives each module; of these only the mode decides, which is asked by itself."""
_REQUIRES_GRAD, _CLASS, _TRAINING = (attrgetter(name) for name in ("requires_grad", "__class__", "training"))


@runtime_checkable
class SendsNumbers(Protocol):
    """An optimizer whose captured step reads numbers from the device, as those of `accel.optim` do."""

    def refresh(self) -> None:
        """Send what has changed."""

    def frozen_options(self, group: dict[str, Any]) -> tuple[Any, ...] | None:
        """Return the options of a group that a captured step does not read from the device; None for all of them."""


class Owners:
    """Modules and optimizers whose state decides what a step computes."""

    def __init__(self, modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
        self.modules, self.optimizers = list(modules), list(optimizers)
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._contents: list[dict[str, Any]] = []
        self._settings: list[tuple[dict[str, Any], str]] = []
        """Where a module has a plain value or a tensor of its own: a rate of dropout, a mask."""
        self._stepped: list[Tensor] = []
        self.every: list[nn.Module] = []
        self._inner: list[nn.Module] = []
        self._inner_contents: list[dict[str, Any]] = []
        self.refresh()

    def refresh(self) -> None:
        """List the parameters and buffers again: some may have come or gone."""
        every = {id(each): each for module in self.modules for each in module.modules()}
        self.every = list(every.values())
        self._inner = [each for each in self.every if all(each is not module for module in self.modules)]
        dicts: list[dict[str, Any]] = [d for each in self.every for d in (each._parameters, each._buffers)]
        self._slots = [(d, name) for d in dicts for name in d]
        self._contents = [vars(each) for each in self.every]
        self._inner_contents = [vars(each) for each in self._inner]
        self._settings = [(d, name) for d in self._contents for name in d if _is_setting(name, d[name])]
        owned = {id(d[name]) for d, name in self._slots}
        stepped = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        self._stepped = [p for p in stepped if id(p) not in owned]

    def tensors(self) -> list[Tensor]:
        """Return the parameters and buffers as they are now: one may have been replaced."""
        return [tensor for d, name in self._slots if (tensor := d.get(name)) is not None] + self._stepped

    def _held(self) -> list[Tensor | None]:
        """Return the same with None where there is none: a call may have filled the place since."""
        held: list[Tensor | None] = [d.get(name) for d, name in self._slots]
        return held + self._stepped

    def form(self) -> tuple[Hashable, ...]:
        """Return what a model's graph has frozen: modes, code, numbers of modules, where tensors lie, which train."""
        # In a key at every call, so each line goes through all tensors or modules without Python for each.
        tensors = self.tensors()
        places = tuple(map(Tensor.data_ptr, tensors)), tuple(map(_REQUIRES_GRAD, tensors))
        return tuple(map(_TRAINING, self.every)), self._code(), self._values(), places

    def _values(self) -> Hashable:
        values: list[Any] = list(starmap(dict.get, self._settings))
        kinds = tuple(map(type, values))  # 1 and 1.0 are equal, and not the same factor
        if not PLAIN.issuperset(kinds):
            values = list(map(_frozen, values))
        return tuple(values), kinds, tuple(map(len, self._contents))

    def _code(self) -> Hashable:
        """Return what runs in calls of the modules: someone may have put another class, forward or call in its place.

        A model's own slot is left out: the captured call stands there.
        """
        forwards = map(dict.get, self._contents, repeat("forward"))
        slots = map(dict.get, self._inner_contents, repeat(callslot.NAME))
        return tuple(map(_CLASS, self.every)), *(
            tuple([None if v is None else _Same(v) for v in each]) for each in (forwards, slots)
        )

    def entries(self) -> list[Any]:
        """Return what optimizers keep for each parameter: someone may clear it, or load another."""
        groups = [(each.state, group["params"]) for each in self.optimizers for group in each.param_groups]
        return [state.get(p) for state, params in groups for p in params]

    def numbers(self, kind: str) -> tuple[Hashable, ...]:
        """Return the optimizers' options that a graph has frozen: those that are no tensors there, and aren't sent."""
        groups = [(optimizer, group) for optimizer in self.optimizers for group in optimizer.param_groups]
        return tuple([_options(optimizer, group, kind) for optimizer, group in groups])

    def send(self) -> None:
        """Let optimizers bring to the device, for a replay or a capture, what has changed on the host."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, SendsNumbers):
                optimizer.refresh()

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients, tensor by tensor."""
        return [None if t is None else t.grad for t in self._held()]

    def made(self, before: list[Tensor | None]) -> list[tuple[Tensor, Tensor | None]]:
        """Return the tensors that have another gradient than before, with it; others' gradients are not the step's."""
        pairs = zip(self._held(), before, strict=True)
        return [(t, t.grad) for t, one in pairs if t is not None and t.grad is not one]

    def begun_with(self, before: list[Tensor | None]) -> list[tuple[Tensor, Tensor | None]]:
        """Return the tensors with the gradients that a step began with, but for those that it has replaced."""
        pairs = zip(self._held(), before, strict=True)
        return [(t, one) for t, one in pairs if t is not None and (one is None or t.grad is one)]

    def put(self, gradients: list[Tensor | None]) -> None:
        """Set the gradients."""
        for tensor, gradient in zip(self._held(), gradients, strict=True):
            if tensor is not None and tensor.grad is not gradient:
                tensor.grad = gradient


def _options(optimizer: Optimizer, group: dict[str, Any], kind: str) -> Hashable:
    if isinstance(optimizer, SendsNumbers) and (frozen := optimizer.frozen_options(group)) is not None:
        return tuple([_hashable(value, kind) for value in frozen])
    return tuple([(name, _hashable(value, kind)) for name, value in group.items() if name != "params"])


def _is_setting(name: str, value: object) -> bool:
    return is_looked_at(value) and name not in _OF_EVERY_MODULE


def _frozen(value: Any) -> Hashable:
    """Return what a graph has frozen of a value: where a tensor lies, which is not kept alive by that."""
    if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided:
        return value.data_ptr(), value.dtype, value.shape, value.stride(), value.requires_grad
    if isinstance(value, tuple):
        return tuple(map(_frozen, value))
    return value if type(value) in PLAIN else _Same(value)


class _Same:
    """Equal to another of the same object, which may be a callable that has no hash."""

    __slots__ = ("_of",)

    def __init__(self, of: object) -> None:
        self._of = of

    def __hash__(self) -> int:
        return id(self._of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._of is self._of


def _hashable(value: Any, kind: str) -> Hashable:
    if isinstance(value, Tensor):
        if value.device.type == "cpu" != kind:  # the host reads it at the launch, as it does a number
            return "value", str(value.dtype), repr(value.tolist())
        return "tensor", value.data_ptr()
    if isinstance(value, tuple | list):
        return tuple([_hashable(item, kind) for item in value])
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value  # type: ignore[no-any-return]
