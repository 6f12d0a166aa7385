"""The first steps of an optimizer: which modules they train, and whether a loader feeds them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from threading import get_ident
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from accel.profiler.clocks.called_modules import CalledModules

_LEARNING = 12
"""Steps after which a module that is called by no loop is no more looked for."""

_MODULES = 2
"""Modules of one optimizer that are optimized: their searches take turns, so each makes the last one begin later."""


class OptimizerSteps:
    """Follow the steps of one optimizer.

    What is done after a step is not done in a hook of torch's: hooks can't be added or removed within one.

    Args:
        optimizer: has just stepped for the first time.
        batches: how many the script has been given so far.
        after: called after each of its steps, with these steps.
        among: modules that own its parameters, if that is known. Of none nothing is learnt: steps are only followed.
        registered: returns modules among which those may be.

    Attributes:
        parameters: the identities of those that it trains.
        owned: of all those of the modules that own them.
        updates: steps of all optimizers when it stepped last, kept by the follower.
        from_loader: batches came from a loader between the last two steps.
        is_under_way: a step is being made, and `after` will be called. A step that is made while this is False is one
            that another method made in place of ours: accelerate assigns `optimizer.step` before and after each scaled
            step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        batches: int,
        after: Callable[[OptimizerSteps], None],
        among: Sequence[nn.Module] | None = None,
        registered: Callable[[], Sequence[nn.Module]] = lambda: (),
    ) -> None:
        self.optimizer = optimizer
        self.parameters = parameters_of(optimizer)
        self.updates = 0
        self.from_loader = False
        self._batches, self._after = batches, after
        self._steps = 1
        self._modules = CalledModules(_counting, _counting_hooks, registered)
        self._modules.learn(optimizer, self._steps, among)
        self.roots = self._modules.modules
        """The outermost modules that own its parameters."""
        self.owned = frozenset(id(parameter) for root in self.roots for parameter in root.parameters())
        self._own_step = vars(optimizer).get("step")
        self.is_under_way = False
        self._step: MethodType | None = _followed(optimizer, self._around)
        vars(optimizer)["step"] = self._step

    def _around(self, step: Callable[[], Any]) -> Any:
        self.is_under_way = True
        try:
            result = step()
        finally:
            self.is_under_way = False
        self._after(self)
        return result

    def learned(self, batches: int) -> bool:
        """Count a step; return whether what it trains is known, as far as it can be."""
        self._steps += 1
        self.from_loader, self._batches = batches > self._batches, batches
        if self._modules.called or self._steps >= _LEARNING:
            return True
        self._modules.descend(self._steps)
        return False

    def trained(self) -> list[nn.Module]:
        """Return the largest modules that the loop calls, if they are most of what is trained, or else the whole."""
        called = sorted(self._modules.called_modules, key=_size, reverse=True)[:_MODULES]
        whole = max(self.roots, key=_size)
        return called if 2 * sum(map(_size, called)) >= _size(whole) else [whole]

    def release_modules(self) -> None:
        """Restore the modules."""
        self._modules.release()

    def release(self) -> None:
        """Restore the modules and the optimizer."""
        self.release_modules()
        self._after = lambda steps: None
        ours, self._step = self._step, None  # it holds this object: both would wait for the garbage collector
        if ours is not None and vars(self.optimizer).get("step") is ours:  # within another wrapper it stays
            del self.optimizer.step
            if self._own_step is not None:
                vars(self.optimizer)["step"] = self._own_step


def parameters_of(optimizer: Optimizer) -> frozenset[int]:
    """Return the identities of the parameters that an optimizer trains."""
    return frozenset(id(parameter) for group in optimizer.param_groups for parameter in group["params"])


def _followed(optimizer: Optimizer, around: Callable[[Callable[[], Any]], Any]) -> MethodType:
    """Return the optimizer's `step`, made by `around`: a bound method, as schedulers expect, with their marks."""
    plain = optimizer.step

    @functools.wraps(plain)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return around(functools.partial(plain, *args, **kwargs))

    return MethodType(step, optimizer)


def _counting(target: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    """Return a module's call that counts itself, if it is made with gradients in this thread."""
    thread = get_ident()

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += torch.is_grad_enabled() and get_ident() == thread
        return target(*args, **kwargs)

    return counting


def _counting_hooks(calls: list[int]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return forward hooks that do the same."""

    def before(module: Any, args: Any) -> None:
        calls[0] += torch.is_grad_enabled()

    return before, lambda module, args, output: None


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))
