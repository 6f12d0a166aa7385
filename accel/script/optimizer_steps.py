"""The first steps of an optimizer: which modules they train, and whether a loader feeds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


GONE_AFTER = 200
"""Updates without a step of an optimizer, besides one of each other that is followed, after which it is let go of."""
_HOPELESS = 50
"""Optimizers that were let go of after which no new one is followed."""


class OptimizerSteps:
    """Follow the steps of one optimizer.

    Args:
        optimizer: has just stepped for the first time.
        batches: how many the script has been given so far.
        called: called before each call with gradients of a module that may be the one it trains.
        among: modules that own its parameters, if that is known.
        registered: returns modules among which those may be.

    Attributes:
        parameters: the identities of those that it trains.
        roots: the outermost modules that own its parameters.
        owned: the identities of all parameters of those.
        updates: steps of all optimizers when it stepped last, kept by the follower.
        from_loader: batches came from a loader between the last two steps.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        batches: int,
        called: Callable[[], None],
        among: Sequence[nn.Module] | None = None,
        registered: Callable[[], Sequence[nn.Module]] = lambda: (),
    ) -> None:
        self.optimizer = optimizer
        self.parameters = parameters_of(optimizer)
        self.updates = 0
        self.from_loader = False
        self._batches, self._steps = batches, 1
        self._modules = CalledModules(partial(_counting, called), partial(_counting_hooks, called), registered)
        self._modules.learn(optimizer, self._steps, among)
        self.roots = self._modules.modules
        self.owned = frozenset(id(parameter) for root in self.roots for parameter in root.parameters())

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


class Learners:
    """Follow a bounded number of optimizers that have stepped once until they step again, which many never do.

    A loop may make an optimizer for each step, or copy its model for each. Followed for good, they would all stay in
    memory, and each would slow the calls of its model down.
    Of those that train the same parameters the last two stay: one that is made anew for each task, and that of the loop
    around the tasks.

    Args:
        models: at most so many are followed at a time, with all their optimizers.
        given_up: called with each optimizer that is followed no more although what it trains is not known.
    """

    def __init__(self, models: int, given_up: Callable[[Optimizer], None] = lambda optimizer: None) -> None:
        self._models, self._on_given_up = models, given_up
        self._followed: dict[int, OptimizerSteps] = {}
        self._given_up = 0

    def __iter__(self) -> Iterator[OptimizerSteps]:
        return iter(list(self._followed.values()))

    @property
    def is_hopeless(self) -> bool:
        """True once so many optimizers stepped only once that new ones will, too."""
        return self._given_up >= _HOPELESS

    def get(self, optimizer: object) -> OptimizerSteps | None:
        """Return the steps of an optimizer that is followed, None for any other."""
        return self._followed.get(id(optimizer))

    def owners(self, optimizer: Optimizer) -> list[nn.Module] | None:
        """Return the outermost modules that own its parameters if another one of theirs is followed, else None."""
        parameters = parameters_of(optimizer) if self._followed else frozenset()
        return next((each.roots for each in self if parameters <= each.owned), None)

    def has_room_for(self, optimizer: Optimizer) -> bool:
        """Return whether it can be followed without giving up another one."""
        parameters = parameters_of(optimizer)
        return self._count() < self._models and all(each.parameters.isdisjoint(parameters) for each in self)

    def add(self, steps: OptimizerSteps) -> None:
        """Follow an optimizer, in place of earlier ones."""
        for earlier in self._of_the_same(steps)[:-1]:
            self._give_up(earlier)
        self._followed[id(steps.optimizer)] = steps
        while self._count() > self._models:
            self._give_up(next(iter(self)))

    def take(self, steps: OptimizerSteps) -> None:
        """Follow an optimizer no more, whose modules are known, nor others that train the same."""
        self._followed.pop(id(steps.optimizer), None)
        for other in self._of_the_same(steps):
            self._give_up(other)

    def let_go_of_idle(self, updates: int) -> None:
        """Follow those no more that have not stepped for long.

        Args:
            updates: steps of all optimizers so far.
        """
        limit = GONE_AFTER + len(self._followed)
        for steps in self:
            if updates - steps.updates >= limit:
                self._give_up(steps)

    def release(self) -> None:
        """Restore all of them."""
        for steps in self:
            steps.release()
        self._followed.clear()

    def _count(self) -> int:
        """Return the number of models that are followed."""
        return len({frozenset(map(id, each.roots)) for each in self})

    def _of_the_same(self, steps: OptimizerSteps) -> list[OptimizerSteps]:
        """Return those that train some of the same parameters, the latest last."""
        return [other for other in self if not other.parameters.isdisjoint(steps.parameters)]

    def _give_up(self, steps: OptimizerSteps) -> None:
        del self._followed[id(steps.optimizer)]
        self._given_up += 1
        self._on_given_up(steps.optimizer)
        steps.release()


def parameters_of(optimizer: Optimizer) -> frozenset[int]:
    """Return the identities of the parameters that an optimizer trains."""
    return frozenset(id(parameter) for group in optimizer.param_groups for parameter in group["params"])


def _counting(called: Callable[[], None], target: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    """Return a module's call that counts itself, if it is made with gradients in this thread."""
    thread = get_ident()

    def counting(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and get_ident() == thread:
            calls[0] += 1
            if not torch.compiler.is_compiling():
                called()
        return target(*args, **kwargs)

    return counting


def _counting_hooks(called: Callable[[], None], calls: list[int]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return forward hooks that do the same."""
    thread = get_ident()

    def before(module: Any, args: Any) -> None:
        if torch.is_grad_enabled() and get_ident() == thread:
            calls[0] += 1
            if not torch.compiler.is_compiling():
                called()

    return before, lambda module, args, output: None


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))
