"""The first steps of an optimizer: which modules they train, and whether a loader feeds them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from accel.profiler.loop.called_modules import CalledModules

_LEARNING = 12
"""Steps after which a module that is called by no loop is no more looked for."""

_MODULES = 2
"""Modules of one optimizer that are optimized: their searches take turns, so each makes the last one begin later."""


class OptimizerSteps:
    """Follow the steps of one optimizer.

    Args:
        optimizer: has just stepped for the first time.
        batches: how many the script has been given so far.
        called: called before each call with gradients of a module that may be the one it trains.

    Attributes:
        parameters: the identities of those that it trains.
        roots: the outermost modules that own its parameters.
        from_loader: batches came from a loader between the last two steps.
    """

    def __init__(self, optimizer: Optimizer, batches: int, called: Callable[[], None]) -> None:
        self.optimizer = optimizer
        self.parameters = parameters_of(optimizer)
        self.from_loader = False
        self._batches, self._steps = batches, 1
        self._modules = CalledModules(partial(_counting, called), partial(_counting_hooks, called))
        self._modules.learn(optimizer, self._steps)
        self.roots = self._modules.modules

    @property
    def is_called(self) -> bool:
        """Whether the loop calls one of its modules with gradients."""
        return self._modules.called

    def learned(self, batches: int) -> bool:
        """Count a step; return whether what it trains is known, as far as it can be."""
        self._steps += 1
        self.from_loader, self._batches = batches > self._batches, batches
        if self.is_called or self._steps >= _LEARNING:
            return True
        self._modules.descend(self._steps)
        return False

    def trained(self) -> list[nn.Module]:
        """Return the largest modules that the loop calls, if they are most of what is trained, or else the whole."""
        called = sorted(self._modules.called_modules, key=_size, reverse=True)[:_MODULES]
        whole = max(self.roots, key=_size)
        return called if 2 * sum(map(_size, called)) >= _size(whole) else [whole]

    def release(self) -> None:
        """Restore the modules."""
        self._modules.release()


def parameters_of(optimizer: Optimizer) -> frozenset[int]:
    """Return the identities of the parameters that an optimizer trains."""
    return frozenset(id(parameter) for group in optimizer.param_groups for parameter in group["params"])


def _counting(called: Callable[[], None], target: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    """Return a module's call that counts itself, if it is made with gradients in this thread."""
    before, _ = _counting_hooks(called, calls)

    def counting(*args: Any, **kwargs: Any) -> Any:
        before()
        return target(*args, **kwargs)

    return counting


def _counting_hooks(called: Callable[[], None], calls: list[int]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return forward hooks that do the same."""
    thread = get_ident()

    def before(*_: Any) -> None:
        if torch.is_grad_enabled() and get_ident() == thread:
            calls[0] += 1
            if not torch.compiler.is_compiling():
                called()

    return before, lambda *_: None


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))
