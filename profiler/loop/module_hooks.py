"""The hooks that are on a model's modules, and which of them are the loop's own."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL = [vars(nn.modules.module)[f"_global{name}"] for name in _HOOKS]
"""Those of all modules (`register_module_forward_hook`)."""
_OUR_HOOKS = ("torch.", "accel.")
"""Modules whose hooks, such as those of spectral norms, bear any layout and keep nothing for the loop."""


def hooks_of(model: nn.Module) -> list[dict[Any, Any]]:
    """Return the dictionaries in which the hooks stand of all its modules, and of all modules there are."""
    return [*_GLOBAL, *(vars(module)[name] for module in model.modules() for name in _HOOKS if name in vars(module))]


def of_the_loop(hooks: Iterable[dict[Any, Any]]) -> list[Any]:
    """Return the hooks in these dictionaries that are neither torch's nor accel's."""
    return [hook for each in hooks for hook in each.values() if not home_of(hook).startswith(_OUR_HOOKS)]


def home_of(hook: Any) -> str:
    """Return the name of the module that a hook is defined in, with a dot."""
    function = hook.func if isinstance(hook, partial) else hook
    return f"{getattr(function, '__module__', None) or ''}."
