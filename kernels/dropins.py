"""Classes laid over those of a model's modules: another `forward`, and all else stays.

A module that is switched gets a subclass of its own class. So isinstance, `state_dict`, hooks, parameters and
attributes stay; copies and pickles are of the class it had.
"""

from __future__ import annotations

import copy
import copyreg
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from accel.kernels import support

_dropin_classes: WeakValueDictionary[tuple[type, type], type[nn.Module]] = WeakValueDictionary()


class DropIn:
    """Base of the classes that replace a module's own; copies and pickles name the class it had."""

    host: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # What object.__reduce_ex__ returns names this class, and pickle insists on it; this is its older form.
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, *state = reduced
        return (copyreg._reconstructor, (self.host, object, None), *state)  # type: ignore[attr-defined]


def dropin_class(dropin: type[DropIn], host: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `host` with the methods of `dropin`, under the host's name."""
    fused = _dropin_classes.get((dropin, host))
    if fused is None:
        names = {name: getattr(host, name) for name in ("__module__", "__qualname__", "__doc__")}
        fused = _dropin_classes[dropin, host] = type(host.__name__, (dropin, host), {"host": host, **names})
    return fused


def runs_fused(x: Tensor) -> bool:
    """Return whether a call on `x` gains from the op: without kernels it is plain torch like the module's own.

    A program that is exported or traced holds the library's own operators, and so runs where this package is not.
    """
    # The flag itself: in code that torch 2.11 compiles, `is_exporting()` is True as well.
    exports = torch.compiler._is_exporting_flag
    return support.runs_triton(x) and not exports and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def is_transformed() -> bool:
    """Return whether a function transform of torch's is at work, for which a library's kernels may have no rule."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def is_hooked(*modules: Any) -> bool:
    """Return whether there are hooks on modules that the fused op doesn't call."""
    return any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in modules)


@dataclass
class SwitchedModules:
    """The modules of a model that run by drop-ins."""

    names: list[str] = field(default_factory=list)
    """Names of the modules."""
    refused: dict[str, str] = field(default_factory=dict)
    """Name → why a module that looks as if it could be switched was left alone."""
    _switched: list[tuple[nn.Module, type[nn.Module], type[nn.Module]]] = field(default_factory=list, repr=False)

    def switch(self, module: nn.Module, dropin: type[DropIn]) -> None:
        """Lay a drop-in over a module's class."""
        host, switched = type(module), dropin_class(dropin, type(module))
        self._switched.append((module, host, switched))
        module.__class__ = switched

    def undo(self) -> None:
        """Restore all modules' own classes."""
        for module, host, _ in self._switched:
            module.__class__ = host

    def redo(self) -> None:
        """Switch them again."""
        for module, _, switched in self._switched:
            module.__class__ = switched


def without_hooks(module: nn.Module) -> nn.Module:
    """Return a copy for inference without hooks, so that a test of it triggers none."""
    twin = copy.deepcopy(module).eval()
    for part in twin.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks):
            hooks.clear()
    return twin
