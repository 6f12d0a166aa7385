"""The model's calls, the backward passes and the updates: timed, recorded for the guard, checked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from accel.profiler.loop import backward
from accel.profiler.loop.optimizers import Arguments, Strangers, followed_by
from accel.profiler.loop.steps import is_described, is_transformed
from accel.profiler.loop.update_hooks import UPDATES
from accel.search.actions import Action
from accel.session.plan_check import PlanCheck
from accel.session.replays import Replays
from accel.session.state import Mode, keeping_grad_mode, outside_autocast
from accel.session.step_watch import StepWatch

if TYPE_CHECKING:
    from accel.goodput.noise_meter import NoiseMeter
    from accel.session.events import StepEvents
    from accel.session.switchboard import Switchboard

_MEASURING, _RESTING, _SUSPENDED, _CLOSED = Mode

# The first steps with plain calls, which show the model's usual inputs and outputs.
_LEARNING_STEPS = 64
# So many calls are looked at again after the usual batch has changed.
_LEARNING_CALLS = 10

Hear = Callable[[tuple[Any, ...], dict[str, Any]], None]
"""Is told of the arguments of a call."""


class CallEvents:
    """Stand around each call of the model (`gate.Watcher`).

    Args:
        events: of the run, whose steps these calls are in.
    """

    def __init__(self, events: StepEvents, switchboard: Switchboard) -> None:
        self._events, self._switchboard = events, switchboard
        self._run, self._state, self._clock = events.run, events.state, events.clock
        self._gate = events.run.gate
        replays = Replays(events.run, switchboard, events.state)
        self.watch = StepWatch(replays)
        self.check = PlanCheck(replays, self.watch, self._clock.now)
        self.noise: NoiseMeter | None = None
        """What measures the gradient noise, if something does."""
        self._is_noise_measured = False
        self._heard: Hear | None = None
        self._needs_calls = True
        """The session does, for what is on or tried."""
        self._learnt_steps, self._learnt_at = 0, -1
        """Steps with a plain call that was learnt from, and the boundary before the last of them."""

    def begin(self, action: Action) -> None:
        """Expect the check of an action; leave the gate off the model's calls where nothing needs it."""
        self.check.expect(action.check)
        needed = action.check is not None or action.anatomy or self._gate.wrapped or self._switchboard.suspects()
        self._needs_calls = bool(needed) or not self._events.usage.called or not self._events.rule.is_fed
        self._gate.watch(self if self._needs_calls or self.noise is not None else None)
        self._let_calls_pass()

    def close(self) -> None:
        """Release the calls that were kept or recorded, and tell nobody of others."""
        self._heard, self._is_noise_measured = None, False
        self.watch.close()
        self.check.close()

    def _let_calls_pass(self) -> None:
        """Look at calls only where they are needed: for the noise, in one step of a hundred."""
        needed = self._needs_calls or self._is_noise_measured or self._heard is not None
        self._gate.passes = self.noise is not None and not needed

    def measure_noise(self, enabled: bool) -> None:
        """Let `noise` hear of the calls and updates of the step that begins, or not."""
        if enabled != self._is_noise_measured:
            self._is_noise_measured = enabled
            self._let_calls_pass()

    def hear(self, heard: Hear | None) -> None:
        """Tell somebody of the calls, before they are made; None for no more."""
        self._heard = heard
        self._let_calls_pass()

    def before_update(self, optimizer: Optimizer) -> None:
        """Check the gradients that an update is about to use, and measure their noise."""
        self.watch.before_update(optimizer)
        if self._is_noise_measured and self.noise is not None and self.noise.is_measuring:
            with self._state.suspended():  # it may call the model again
                keeping_grad_mode(partial(self.noise.before_update, optimizer))

    def around(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Measure a call, record it if the guard needs it, and check its outputs."""
        mode, usage = self._state.mode, self._events.usage
        if mode is Mode.SUSPENDED or is_described():
            return self._gate.plain(*args, **kwargs)
        if is_transformed():
            usage.called = usage.called or torch.is_grad_enabled()
            return self._gate.plain(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self.watch.calls.call(call, args, kwargs)
        usage.called = True
        if self._events.rule.wants_calls and self._begins_step():
            return self._call_in_next_step(args, kwargs)
        if mode is Mode.RESTING:
            return self._called(call, args, kwargs)
        self._clock.enter("forward")
        try:
            if self.check.wants_recording():
                return self.check.recorded(args, kwargs)
            outputs = self._called(call, args, kwargs)
            self._learn(args, kwargs, outputs)
            return outputs
        finally:
            self._clock.returned()

    def _begins_step(self) -> bool:
        """Return whether the call that is about to be made begins a step that no request has begun."""
        events = self._events
        is_next = events.rule.updated and events.thread == get_ident() and events.usage.iterated
        return is_next and events.rule.call_ends_step()

    def _call_in_next_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with outside_autocast(self._run.device.type):
            self._events.step_begins_with_call()
        return self._gate.again(*args, **kwargs)

    def _learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Learn from a plain call, in the first steps that have one and after each change of the usual batch."""
        shapes = self._run.observed.call_shapes
        if self._learnt_steps >= _LEARNING_STEPS and shapes.total() >= _LEARNING_CALLS:
            return
        if self.watch.learn(args, kwargs, outputs) and self._learnt_at != self._events.boundaries:
            self._learnt_steps, self._learnt_at = self._learnt_steps + 1, self._events.boundaries

    def _called(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call and check its outputs; one that is recorded for the noise is made plainly."""
        if self._heard is not None:
            self._heard(args, kwargs)
        if self._is_noise_measured and self.noise is not None and self.noise.wants_call:
            return self.noise.call(self._gate.plain, args, kwargs)
        return self.watch.call(call, args, kwargs)


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
            self._calls.watch.backward_ended(roots)
