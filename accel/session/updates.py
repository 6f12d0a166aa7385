"""The updates of the user's loop, and the backward passes before them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from accel.profiler.loop import backward
from accel.profiler.loop.optimizers import Arguments, Strangers, followed_by
from accel.profiler.loop.update_hooks import UPDATES
from accel.session.state import Mode

if TYPE_CHECKING:
    from accel.session.events import StepEvents

_MEASURING, _RESTING, _SUSPENDED, _CLOSED = Mode


class UpdateEvents:
    """Listen to the optimizers of the process, and to autograd while gradients are checked.

    Args:
        events: of the run, whose steps end after these updates.
    """

    def __init__(self, events: StepEvents) -> None:
        self._events = events
        self._run, self._state, self._calls = events.run, events.state, events.calls
        self._rule, self._clock, self._loader = events.rule, events.clock, events.loader
        self._strangers = Strangers()
        self._stepping = self._passing = 0
        """The id of the optimizer that is stepping: the one if it is the model's, the other if it is none of its."""
        self._forget: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Listen to all optimizers; and to backward passes, until the first step has ended: which model is trained?"""
        self._forget = UPDATES.add(self._begins, self._ended)
        backward.listen(self)

    def close(self) -> None:
        """Listen no more."""
        self._forget()
        backward.forget(self)

    def _owns(self, optimizer: Optimizer) -> bool:
        for own in self._run.optimizers:  # no any(): it takes 0.5 µs more, twice a step
            # One with the attributes of another stands in for it in a scaled step, and its class calls its base's step.
            if optimizer is own or optimizer.__dict__ is own.__dict__:
                return True
        if optimizer in self._strangers:
            return False  # searched once: a cross validation leaves many sessions, and each sees every optimizer's step
        trained = set(map(id, self._run.model.parameters()))  # of now: the loop may have put others in their places
        mine = any(id(p) in trained for group in optimizer.param_groups for p in group["params"])
        if mine:
            self._run.optimizers.append(optimizer)
        else:
            self._strangers.add(optimizer)
        return mine

    def _begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Arguments | None:
        mode = self._state.mode
        self._stepping = self._passing = 0
        if mode is _SUSPENDED:
            return None
        if not self._owns(optimizer):
            self._passing = id(optimizer)
            return None
        self._stepping = id(optimizer)
        self._rule.is_updating = True
        if mode is _MEASURING:
            self._clock.update()
        if args[1:] or kwargs:  # seldom
            arguments = followed_by(partial(self._calls.before_update, optimizer), args, kwargs)
            if arguments is not None:
                return arguments
        self._calls.before_update(optimizer)
        return None

    def _ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        mode = self._state.mode
        if mode is _SUSPENDED:
            return
        key = id(optimizer)
        if key != self._stepping and (key == self._passing or not self._owns(optimizer)):
            return
        events, rule = self._events, self._rule
        if mode is _MEASURING:
            self._clock.updated()
        if events.thread != get_ident() and not backward.is_running():  # CUDA has threads for it
            events.thread = get_ident()
        if rule.has_batch:  # else the update is by one that the loop has kept
            self._loader.source = self._loader.delivered
        rule.update(optimizer)
        if rule.wants_calls and self._run.gate.watcher is None:
            self._run.gate.watch(self._calls)
        if not events.usage.iterated:
            events.usage.updated_without_batch()

    def backward_begins(self, roots: list[Tensor]) -> None:
        """Record whether gradients are there already."""
        self._calls.watch.backward_begins()

    def backward_ended(self, roots: list[Tensor]) -> None:
        """Check the gradients."""
        if self._state.mode is not _SUSPENDED:
            if not self._events.steps and not self._events.usage.called:
                self._events.usage.trained_elsewhere()
            self._calls.watch.backward_ended(roots)
