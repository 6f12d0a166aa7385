"""Modules that were given parameters or parts in the run: a model is found without going through all objects.

Torch calls these hooks for each parameter and each part that a module registers. What is unpickled or copied registers
nothing, so a model may be missing here.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class RegisteredModules:
    """Note modules as they are built; none is kept alive."""

    def __init__(self) -> None:
        self._modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._handles: list[Any] = []

    def start(self) -> None:
        """Begin with what is built from now on."""
        self._handles = [
            register_module_parameter_registration_hook(self._note),
            register_module_module_registration_hook(self._note),
        ]

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def seen(self) -> list[nn.Module]:
        """Return those that still exist."""
        try:
            return list(self._modules.values())
        except RuntimeError:  # another thread builds one just now
            return []

    def _note(self, module: nn.Module, name: str, part: Any) -> None:
        # The hook's result would take the part's place.
        self._modules[id(module)] = module
