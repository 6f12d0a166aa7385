"""Turn the loop's events into steps, and mark their times on the clock.

The loader reports when a batch is requested and delivered, the optimizers when an update begins and ends, the gate when
the model is called, autograd when a backward pass has ended. Where a step ends is the rule of `profiler/loop/steps.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from accel.dataio import batches
from accel.dataio.passes.proxy import Fetching, LoaderProxy
from accel.profiler.loop import backward, device
from accel.profiler.loop.clock import StepClock
from accel.profiler.loop.device import DeviceClock
from accel.profiler.loop.observers import LoopObserver
from accel.profiler.loop.optimizers import Arguments, Strangers, followed_by
from accel.profiler.loop.steps import StepRule, is_described, is_transformed
from accel.run import ranks
from accel.run.context import Run
from accel.run.gate import Call
from accel.session.guard_runner import GuardRunner
from accel.session.observation import Observation
from accel.session.state import Mode, RunState, keeping_grad_mode, outside_autocast
from accel.session.training_loader import TrainingLoader
from accel.session.usage import Usage

_MEASURING, _RESTING, _SUSPENDED, _CLOSED = Mode
# The first steps with plain calls, which show the model's usual inputs and outputs.
_LEARNING_STEPS = 64
# So many calls are looked at again after the usual batch has changed.
_LEARNING_CALLS = 10


class StepListener(Protocol):
    """Notified of the steps."""

    def epoch_begins(self) -> None:
        """The first batch of an epoch is requested."""

    def step_ended(self) -> None:
        """A measured step has ended; everything is switched here and nowhere else."""

    def step_passed(self) -> None:
        """A step of rest has ended."""

    def spent_aside(self, seconds: float) -> None:
        """So much of the step under way was the search's own, and is not counted in it."""

    def epoch_ended(self) -> None:
        """The training loader has no more batches in this epoch; its last step has ended."""

    def fetching_failed(self, error: Exception) -> None:
        """Fetching ahead failed; the loop fetches plainly again, and no batch is lost."""

    def leave_out_step(self) -> None:
        """The step under way is like no other one."""

    @property
    def usual_batch(self) -> tuple[int, Hashable]:
        """Samples of most steps, 0 if unknown, and the shape of most batches."""


class NoiseSource(Protocol):
    """Measures the gradient noise in some of the steps."""

    @property
    def is_measuring(self) -> bool:
        """True within a measured step."""

    @property
    def wants_call(self) -> bool:
        """True while the model's calls should go through `call`."""

    def call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of the model, and record it."""

    def before_update(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""


class StepEvents(LoopObserver):
    """Turn the loop's events into steps.

    Args:
        run: the user's objects.
        state: the mode, which decides how events are handled.
        clock: receives the times.
        guard: checks calls, gradients and updates.
        usage: records what the loop uses.
        loader: records which loader batches come from.
        listener: notified of the steps.
    """

    def __init__(
        self,
        run: Run,
        *,
        state: RunState,
        clock: StepClock,
        guard: GuardRunner,
        usage: Usage,
        loader: TrainingLoader,
        listener: StepListener,
    ) -> None:
        self._run, self._state, self._clock = run, state, clock
        self._guard, self._usage, self._loader, self._listener = guard, usage, loader, listener
        self.steps = 0
        """Steps that have ended."""
        self.device = DeviceClock(lambda: device.events_on(run.device)())
        """Times the steps on a GPU."""
        self.boundaries = 0
        """Boundaries that were passed: also those before the search began, which its steps don't count."""
        self.epochs = 0
        """Epochs of the training loader that have begun."""
        self.observation: Observation | None = None
        """The profiler's view of the present steps, if they are observed."""
        self.noise: NoiseSource | None = None
        """What measures the gradient noise, if something does."""
        self._is_noise_measured = False
        self._heard: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None
        self._needs_calls = True
        """The session does, for what is on or tried."""
        self._strangers = Strangers()
        self._epoch_is_new = False
        self._pass_began_at = -1
        """The boundary at the first request of the newest pass."""
        self._stepping = self._passing = 0
        """The id of the optimizer that is stepping: the one if it is the model's, the other if it is none of its."""
        self._thread: int | None = None
        """That trains, once it is known."""
        self.rule = StepRule(lambda: bool(run.optimizers), lambda: ranks.are_several())
        """Where a step ends."""
        self._learnt_steps, self._learnt_at = 0, -1
        """Steps with a plain call that was learnt from, and the boundary before the last of them."""
        self._between_steps: Callable[[], None] = lambda: None
        self._hooks: list[Any] = []

    def start(self) -> None:
        """Listen to the optimizers and to the model's calls."""
        self._hooks = [
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ended),
        ]
        self._run.gate.watch(self)
        backward.listen(self)  # until the first step has ended: which model is trained?

    def close(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._heard = [], None
        self.rule.needs_requests, self._is_noise_measured = True, False
        self.device.close()
        backward.forget(self)

    def observe(self, enabled: bool) -> None:
        """Let the profiler observe the coming steps, or stop it."""
        if self.observation is not None:
            self.observation.close()
        self.observation = None
        if enabled:
            self.observation = Observation(
                self._clock, self._run, number=lambda: self.steps, counts=lambda: self._state.mode is _MEASURING
            )

    def makes_batches(self, between_steps: Callable[[], None]) -> None:
        """Begin the first step of a loop that makes its own batches: its steps end at the model's calls.

        Args:
            between_steps: called after each step.
        """
        self._usage.iterated, self._between_steps = True, between_steps
        self.rule.makes_batches()
        self._clock.restart(first=True)

    # -- the loader ----------------------------------------------------------------------------------------------------

    @property
    def fetching(self) -> Fetching:
        """The fetching that strategies may change."""
        return self._run.fetching

    def epoch_begins(self, proxy: LoaderProxy) -> None:
        """Begin a step: the time between two passes belongs to neither, unless the loop begins one for each step."""
        self.epochs += proxy._accel_loader is self._run.loader
        self._usage.iterated = True
        is_left = self.rule.has_ended() and self._thread in (None, get_ident())
        if is_left and proxy is self._loader.delivered and self.boundaries == self._pass_began_at:
            self._pass_began_at += 1  # `next(iter(loader))`: to begin a pass is a part of the step that ends
            if self._state.mode is _MEASURING:
                self._clock.enter("data")
            return
        self._epoch_is_new = True
        self._clock.restart(first=True)
        if self._state.mode is _MEASURING:
            self.device.begin_again()
            if is_left and not ranks.are_several():  # its time is gone; ranks leave out the same steps
                self._listener.leave_out_step()

    def batch_requested(self) -> None:
        """End the step if an optimizer has stepped since the last boundary."""
        mode = self._state.mode
        if mode is _SUSPENDED or mode is _CLOSED:
            return
        self.rule.has_batch = False
        if self._thread != get_ident() and self._thread is not None:
            self._usage.requested_elsewhere()  # the training is anywhere in its step
            self.rule.needs_requests = True
            return
        if torch.is_inference_mode_enabled() and self._run.optimizers:
            return  # an evaluation, before the training asks for its next batch: calls in this mode have no gradients
        if not self._epoch_is_new:
            self._end_step()
            return
        self._epoch_is_new = False
        keeping_grad_mode(self._listener.epoch_begins)
        if self._state.mode is not _CLOSED:
            self._end_step()
            self._pass_began_at = self.boundaries

    def _end_step(self) -> None:
        """End the step, if there was one."""
        rule = self.rule
        has_ended = rule.updated or rule.has_ended()
        if has_ended:
            rule.updated, rule.batches = False, 0
        if self._state.mode is _RESTING:
            if has_ended:
                self.boundaries += 1
                keeping_grad_mode(self._listener.step_passed)
            return
        self._clock.enter("data")
        if self.observation is not None:
            self.observation.batch_requested()
        if has_ended:
            self.boundaries += 1
            keeping_grad_mode(self._listener.step_ended)

    def batch_delivered(self, batch: Any, proxy: LoaderProxy) -> None:
        """Count the batch, and record its size and loader."""
        mode = self._state.mode
        if mode is _SUSPENDED or mode is _CLOSED:
            return
        rule = self.rule
        rule.batches += 1
        rule.has_batch = True
        if proxy is not self._loader.delivered:
            self._loader.turns_to(proxy)
        if mode is _MEASURING:
            samples, shape = batches.describe(batch)
            self._clock.batch(samples, shape)
            if self.observation is not None:
                self.observation.batch_delivered()

    def epoch_ended(self, proxy: LoaderProxy) -> None:
        """Pass it on: the request that reached the epoch's end has closed its last step."""
        if self._state.mode is _MEASURING and proxy._accel_loader is self._run.loader:
            self._listener.epoch_ended()

    def drain(self) -> float:
        """Wait until a GPU has done what was queued, and return the seconds until then; 0 without one."""
        if not self._run.cuda:
            return 0.0
        is_passed, began = self.device.is_passed(), self._clock.now()
        torch.cuda.synchronize(self._run.device)
        seconds = self._clock.now() - began
        if is_passed:
            self.device.went_on(seconds)
        return seconds

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out of the step what is done here within it: it is the search's own."""
        if self._state.mode is not _MEASURING or self._thread not in (None, get_ident()):
            yield
            return
        clock = self._clock
        clock.enter(clock.code)
        self.device.mark()
        began = clock.now()
        try:
            yield
        finally:
            self._listener.spent_aside(clock.now() - began)
            self.device.mark()
            clock.skip()

    def fetching_failed(self, error: Exception) -> None:
        """Pass on that worker processes failed; the proxy has gone back to plain fetching and lost no batch."""
        self._listener.fetching_failed(error)

    # -- the optimizers ------------------------------------------------------------------------------------------------

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

    def _optimizer_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Arguments | None:
        mode = self._state.mode
        self._stepping = self._passing = 0
        if mode is _SUSPENDED:
            return None
        if not self._owns(optimizer):
            self._passing = id(optimizer)
            return None
        self._stepping = id(optimizer)
        self.rule.is_updating = True
        if mode is _MEASURING:
            self._clock.update()
        if args[1:] or kwargs:  # seldom
            arguments = followed_by(partial(self._before_update, optimizer), args, kwargs)
            if arguments is not None:
                return arguments
        self._before_update(optimizer)
        return None

    def _before_update(self, optimizer: Optimizer) -> None:
        self._guard.before_update(optimizer)
        if self._is_noise_measured and self.noise is not None and self.noise.is_measuring:
            with self._state.suspended():  # it may call the model again
                keeping_grad_mode(partial(self.noise.before_update, optimizer))

    def _optimizer_ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        mode = self._state.mode
        if mode is _SUSPENDED:
            return
        key = id(optimizer)
        if key != self._stepping and (key == self._passing or not self._owns(optimizer)):
            return
        if mode is _MEASURING:
            self._clock.updated()
        if self._thread != get_ident() and not backward.is_running():  # on CUDA a backward pass has threads of its own
            self._thread = get_ident()
        rule = self.rule
        if rule.has_batch:  # else the update is by one that the loop has kept
            self._loader.source = self._loader.delivered
        rule.update(optimizer)
        if rule.wants_calls and self._run.gate.watcher is None:
            self._run.gate.watch(self)
        if not self._usage.iterated:
            self._usage.updated_without_batch()

    # -- the backward pass (a listener of profiler/loop/backward.py) ---------------------------------------------------

    def backward_begins(self, roots: list[Tensor]) -> None:
        """Record whether gradients are there already."""
        self._guard.backward_begins()

    def backward_ended(self, roots: list[Tensor]) -> None:
        """Check the gradients."""
        if self._state.mode is not _SUSPENDED:
            if not self.steps and not self._usage.called:
                self._usage.trained_elsewhere()
            self._guard.backward_ended(roots)

    # -- the model's calls (gate.Watcher) ------------------------------------------------------------------------------

    def watch_calls(self, needed: bool) -> None:
        """Watch the model's calls while the session needs that, or what is measured beside it."""
        self._needs_calls = needed or not self.rule.is_fed
        self._run.gate.watch(self if self._needs_calls or self.noise is not None else None)
        self._let_calls_pass()

    def _let_calls_pass(self) -> None:
        """Look at calls only where they are needed: for the noise, in one step of a hundred."""
        needed = self._needs_calls or self._is_noise_measured or self._heard is not None
        self._run.gate.passes = self.noise is not None and not needed

    def measure_noise(self, enabled: bool) -> None:
        """Let `noise` hear of the calls and updates of the step that begins, or not."""
        if enabled != self._is_noise_measured:
            self._is_noise_measured = enabled
            self._let_calls_pass()

    def hear(self, heard: Callable[[tuple[Any, ...], dict[str, Any]], None] | None) -> None:
        """Tell somebody of the calls, before they are made; None for no more."""
        self._heard = heard
        self._let_calls_pass()

    def around(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Measure a call, record it if the guard needs it, and check its outputs."""
        mode = self._state.mode
        if mode is _SUSPENDED or is_described():
            return self._run.gate.plain(*args, **kwargs)
        if is_transformed():
            self._usage.called = self._usage.called or torch.is_grad_enabled()
            return self._run.gate.plain(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self._guard.evaluate(call, args, kwargs)
        self._usage.called = True
        if self.rule.wants_calls and self._begins_step():
            return self._call_in_next_step(args, kwargs)
        if mode is _RESTING:
            return self._called(call, args, kwargs)
        self._clock.enter("forward")
        try:
            if self._guard.wants_recording():
                return self._guard.recorded(args, kwargs)
            outputs = self._called(call, args, kwargs)
            self._learn(args, kwargs, outputs)
            return outputs
        finally:
            self._clock.returned()

    def _begins_step(self) -> bool:
        """Return whether the call that is about to be made begins a step that no request has begun."""
        rule = self.rule
        return rule.updated and self._thread == get_ident() and self._usage.iterated and rule.call_ends_step()

    def _call_in_next_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End the step, and make the first call of the next one as the gate is then."""
        if self.rule.has_just_changed:
            self._listener.leave_out_step()
        with outside_autocast(self._run.device.type):
            self._end_step()
            self.rule.batches += 1
            if self._state.mode is _MEASURING:
                self._clock.batch(*self._listener.usual_batch)
                if self.observation is not None:
                    self.observation.batch_delivered()
            self._between_steps()
        return self._run.gate.again(*args, **kwargs)

    def _learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Learn from a plain call, in the first steps that have one and after each change of the usual batch."""
        shapes = self._run.observed.call_shapes
        if self._learnt_steps >= _LEARNING_STEPS and shapes.total() >= _LEARNING_CALLS:
            return
        if self._guard.learn(args, kwargs, outputs) and self._learnt_at != self.boundaries:
            self._learnt_steps, self._learnt_at = self._learnt_steps + 1, self.boundaries

    def _called(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call and check its outputs; one that is recorded for the noise is made plainly."""
        if self._heard is not None:
            self._heard(args, kwargs)
        if self._is_noise_measured and self.noise is not None and self.noise.wants_call:
            return self.noise.call(self._run.gate.plain, args, kwargs)
        return self._guard.call(call, args, kwargs)
