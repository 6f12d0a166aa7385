"""The optimizers that have stepped once and are followed until they step again, which many never do.

A loop may make an optimizer for each step, or copy its model for each. Followed for good, they would all stay in
memory, and each would slow the calls of its model down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn
from torch.optim import Optimizer

from accel.script.optimizer_steps import OptimizerSteps, parameters_of

_GONE_AFTER = 200
"""Updates without a step of an optimizer, besides one of each other that is followed, after which it is let go of."""
_HOPELESS = 50
"""Optimizers that were let go of after which no new one is followed."""


class Learners:
    """Follow a bounded number of optimizers.

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
        limit = _GONE_AFTER + len(self._followed)
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
