"""Modules that were made in the run: a model is found without going through all objects.

Torch calls its hooks for each parameter and each part that a module registers. What is unpickled or copied registers
nothing, but is given its state; what is scripted is made by torch itself.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from accel.profiler.clocks.called_modules import parts_of
from accel.profiler.clocks.probes import Function, Patches


class RegisteredModules:
    """Note modules as they are made; none is kept alive.

    `nn.Module.__init__` would tell of all of them, but torch's compiler knows it by its identity.
    """

    def __init__(self) -> None:
        self._modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._copies: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        """Of these, those that were given their state. Their owner may be copied by a method of its own, and unseen."""
        self._has_strangers = False
        """A part was registered by a module that was made unseen: it may belong to others of that kind."""
        self._handles: list[Any] = []
        self._patches = Patches()

    def start(self) -> None:
        """Begin with what is made from now on: to be called before the script makes any."""
        self._handles = [
            register_module_parameter_registration_hook(self._registers),
            register_module_module_registration_hook(self._registers),
        ]
        self._patches.replace(nn.Module, "__setstate__", functools.partial(self._noting, self._copied))
        self._patches.replace(torch.jit.ScriptModule, "__init__", functools.partial(self._noting, self._made))

    def stop(self) -> None:
        """Restore torch."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._patches.remove()

    def seen(self) -> list[nn.Module]:
        """Return those that still exist, with all that they are parts of."""
        if self._has_strangers:
            return []
        try:
            modules, copies = list(self._modules.values()), list(self._copies.values())
        except RuntimeError:  # another thread makes one just now
            return []
        if not copies:
            return modules
        inner = parts_of(modules)
        outermost = [copied for copied in copies if id(copied) not in inner]
        doubtful = parts_of(outermost).union(map(id, outermost))
        return [module for module in modules if id(module) not in doubtful]

    def _registers(self, module: nn.Module, name: str, part: Any) -> None:
        # The hook's result would take the part's place.
        if id(module) not in self._modules:
            self._has_strangers = self._has_strangers or _has_parts(module)
            self._made(module)

    def _made(self, module: nn.Module) -> None:
        self._modules[id(module)] = module

    def _copied(self, module: nn.Module) -> None:
        self._modules[id(module)] = self._copies[id(module)] = module

    def _noting(self, note: Callable[[nn.Module], None], original: Function) -> Function:
        @functools.wraps(original)
        def noting(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if self._patches.on:
                note(module)
            original(module, *args, **kwargs)

        return noting


def _has_parts(module: nn.Module) -> bool:
    return any(part is not None for part in (*module._parameters.values(), *module._modules.values()))
