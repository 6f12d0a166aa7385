"""Turn the loop's events into steps, and mark their times on the clock.

The loader reports when a batch is requested and delivered, the optimizers when an update begins
and the gate when the model is called (`model_events`). Where a step ends is the rule of
`profiler/loop/steps.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from accel.dataio import batches
from accel.profiler.loop import device
from accel.profiler.loop.clock import StepClock
from accel.profiler.loop.observers import LoopObserver
from accel.profiler.loop.steps import StepRule
from accel.run import Run
from accel.session.measured_steps import ActionSteps, Observation
from accel.session.model_events import CallEvents, UpdateEvents
from accel.session.state import Mode, RunState, keeping_grad_mode
from accel.session.training_loader import TrainingLoader, Usage

if TYPE_CHECKING:
    from accel.session.action_runner import ActionRunner
    from accel.session.switchboard import Switchboard

_MEASURING, _RESTING, _SUSPENDED, _CLOSED = Mode


class StepEvents(LoopObserver):
    """Turn the loop's events into steps.

    Args:
        state: the mode, which decides how events are handled.
        switchboard: of the strategies, which act on calls, updates and fetching.
    """

    def __init__(
        self,
        run: Run,
        state: RunState,
        clock: StepClock,
        switchboard: Switchboard,
        runner: ActionRunner,
        say: Callable[[str], None],
    ) -> None:
        self.run, self.state, self.clock = run, state, clock
        self._switchboard, self._runner = switchboard, runner
        self.usage, self.loader = Usage(run, say), TrainingLoader(run, self.aside)
        self.measured = ActionSteps()
        self.steps = 0
        self.device = device.DeviceClock(lambda: device.events_on(run.device)())
        """Times the steps on a GPU."""
        self.boundaries = 0
        """Boundaries that were passed: also those before the search began, which its steps don't count."""
        self.epochs = 0
        """Epochs of the training loader that have begun."""
        self.observation: Observation | None = None
        self.thread: int | None = None
        """The thread that trains, once it is known."""
        self.rule = StepRule(lambda: bool(run.optimizers), lambda: run.has_ranks)
        """Where a step ends."""
        self._epoch_is_new = False
        self._pass_began_at = -1
        """The boundary at the first request of the newest pass."""
        self._between_steps: Callable[[], None] = lambda: None
        self.calls = CallEvents(self, switchboard)
        self.updates = UpdateEvents(self)

    def start(self) -> None:
        """Listen to the optimizers and to the model's calls, and watch the batches being fetched."""
        self.loader.watch(True)
        self.updates.start()
        self.run.gate.watch(self.calls)

    def close(self) -> None:
        """Remove all hooks."""
        self.updates.close()
        self.rule.needs_requests = True
        self.device.close()

    def observe(self, enabled: bool) -> None:
        """Let the profiler observe the coming steps, or stop it."""
        if self.observation is not None:
            self.observation.close()
        self.observation = None
        if enabled:
            self.observation = Observation(
                self.clock, self.run, number=lambda: self.steps, counts=lambda: self.state.mode is _MEASURING
            )

    def makes_batches(self, between_steps: Callable[[], None]) -> None:
        """Begin the first step of a loop that makes its own batches: its steps end at the model's calls."""
        self.usage.iterated, self._between_steps = True, between_steps
        self.rule.makes_batches()
        self.clock.restart(first=True)

    @property
    def fetching(self) -> Any:
        """The fetching that strategies may change."""
        return self.run.fetching

    def epoch_begins(self, proxy: Any) -> None:
        """Begin a step: the time between two passes belongs to neither, unless the loop begins one for each step."""
        self.epochs += proxy._accel_loader is self.run.loader
        self.usage.iterated = True
        is_left = self.rule.has_ended() and self.thread in (None, get_ident())
        if is_left and proxy is self.loader.delivered and self.boundaries == self._pass_began_at:
            self._pass_began_at += 1  # `next(iter(loader))`: to begin a pass is a part of the step that ends
            if self.state.mode is _MEASURING:
                self.clock.enter("data")
            return
        self._epoch_is_new = True
        self.clock.restart(first=True)
        if self.state.mode is _MEASURING:
            self.device.begin_again()
            if is_left and not self.run.has_ranks:  # its time is gone; ranks leave out the same steps
                self.measured.is_left_out = True

    def batch_requested(self) -> None:
        """End the step if an optimizer has stepped since the last boundary."""
        mode = self.state.mode
        if mode is _SUSPENDED or mode is _CLOSED:
            return
        self.rule.has_batch = False
        if self.thread != get_ident() and self.thread is not None:
            self.usage.requested_elsewhere()  # the training is anywhere in its step
            self.rule.needs_requests = True
            return
        if torch.is_inference_mode_enabled() and self.run.optimizers:
            return  # an evaluation, before the training asks for its next batch: calls in this mode have no gradients
        if not self._epoch_is_new:
            self._end_step()
            return
        self._epoch_is_new = False
        keeping_grad_mode(self._runner.epoch_begins)
        if self.state.mode is not _CLOSED:
            self._end_step()
            self._pass_began_at = self.boundaries

    def _end_step(self) -> None:
        rule = self.rule
        has_ended = rule.updated or rule.has_ended()
        if has_ended:
            self.run.observed.batches_of_steps[rule.batches] += 1
            rule.updated, rule.batches = False, 0
        if self.state.mode is _RESTING:
            if has_ended:
                self.boundaries += 1
                keeping_grad_mode(self._runner.step_passed)
            return
        self.clock.enter("data")
        if self.observation is not None:
            self.observation.batch_requested()
        if has_ended:
            self.boundaries += 1
            keeping_grad_mode(self._runner.step_ended)

    def step_begins_with_call(self) -> None:
        """End the step before a call that no request has come before, and begin the next one."""
        if self.rule.has_just_changed:
            self.measured.is_left_out = self.state.mode is _MEASURING
        self._end_step()
        self.rule.batches += 1
        if self.state.mode is _MEASURING:
            self.clock.batch(*self.measured.usual_batch)
            if self.observation is not None:
                self.observation.batch_delivered()
        self._between_steps()

    def batch_delivered(self, batch: Any, proxy: Any) -> None:
        """Count the batch, and record its size and loader."""
        mode = self.state.mode
        if mode is _SUSPENDED or mode is _CLOSED:
            return
        rule = self.rule
        rule.batches += 1
        rule.has_batch = True
        if proxy is not self.loader.delivered:
            self.loader.turns_to(proxy)
        if mode is _MEASURING:
            samples, shape = batches.describe(batch)
            self.clock.batch(samples, shape)
            if self.observation is not None:
                self.observation.batch_delivered()

    def epoch_ended(self, proxy: Any) -> None:
        """Pass it on: the request that reached the epoch's end has closed its last step."""
        if self.state.mode is _MEASURING and proxy._accel_loader is self.run.loader:
            self._runner.epoch_ended()

    def fetching_failed(self, error: Exception) -> None:
        """Switch off what acts on fetching; the proxy has gone back to plain fetching and lost no batch."""
        first_line = next(iter(str(error).splitlines()), "")
        self._switchboard.drop_fetching(f"fetching failed: {type(error).__name__}: {first_line}")

    def drain(self) -> float:
        """Wait until a GPU has done what was queued, and return the seconds until then; 0 without one."""
        if not self.run.cuda:
            return 0.0
        is_passed, began = self.device.is_passed(), self.clock.now()
        torch.cuda.synchronize(self.run.device)
        seconds = self.clock.now() - began
        if is_passed:
            self.device.went_on(seconds)
        return seconds

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out of the step what is done here within it: it is the search's own, and counted as its cost."""
        if self.state.mode is not _MEASURING or self.thread not in (None, get_ident()):
            yield
            return
        clock = self.clock
        clock.enter(clock.code)
        self.device.mark()
        began = clock.now()
        try:
            yield
        finally:
            self.measured.result.aside_s += clock.now() - began
            self.device.mark()
            clock.skip()
