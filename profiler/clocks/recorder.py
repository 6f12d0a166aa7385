"""Turns the marks of the probes into steps: which batch belongs to training, when a step ends, where its time went.

An ordinary step runs only through the marked functions made here, which write to the clock's tape: 6 µs a step in all,
measured on a step of 70 µs, of which 3 are the least that functions in these places take if they check nothing. (In
isolation, without a step between them, the marks of a step take 0.8 µs; the rest is what the step evicts from the
caches. One flag for all states, bits, fewer globals, a tape for each phase: none made a difference above 0.3 µs.) What
is rare (a new iterator, a new optimizer, an evaluation) takes the slow path.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from threading import get_ident
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_globals
from torch.optim import Optimizer

from accel.profiler.clocks import batch_size as samples
from accel.profiler.clocks import facts
from accel.profiler.clocks.called_modules import CalledModules
from accel.profiler.clocks.collate_time import CollateTimer
from accel.profiler.clocks.device_events import DeviceEvents
from accel.profiler.clocks.mark_state import MarkState
from accel.profiler.clocks.probes import Function, Loaders, Probes
from accel.profiler.clocks.segments import KEPT_STEPS, Segments
from accel.profiler.evidence import LoaderFacts
from accel.profiler.phases import CUT, STEP, Measurement, PairTape, StepClock, Tape

_LEARNING_STEPS = 12
"""Steps in which a module that is never called is replaced by its children."""
_LOST = 50
"""After this many updates by other optimizers, the one that ended steps is taken to be gone; before the first step has
ended, after this many updates without a batch, so is the loader."""


class Recorder:
    """Records the steps of an unmodified loop.

    Args:
        clock: seconds, monotonic.
        loaders: loaders that iterate in their own way, each with the class of its iterators.

    Attributes:
        on_step: called between two steps with the step just ended; its time belongs to no step.
        on_segment: called between two steps in place of `on_step` while `deferred` is set, every 64 to 512 steps.
        deferred: True stores the tape unparsed, since parsing costs 4 µs a step; `catch_up` parses it and calls
            `on_step` for these steps.
        ahead: True fetches the batches of the open step while its clock is stopped.
        step_s: seconds in steps, the first left out.
    """

    def __init__(self, clock: StepClock | None = None, *, loaders: Loaders = ()) -> None:
        self.thread = get_ident()
        self.clock = clock or StepClock()
        self.clock.backward_is_seen = True
        self.events: DeviceEvents | None = None
        if torch.cuda.is_available():
            self.events = DeviceEvents(self.clock.write)
            self.clock.write = self.events.write
        self._tape: Tape = self.clock.tape if self.events is None else PairTape(self.events.write)
        self.on_step: Callable[[Measurement], None] = lambda measured: None
        self.on_segment: Callable[[], None] = lambda: None
        self.deferred = False
        self._on_update: Callable[[Optimizer], None] | None = None
        self.on_call: Callable[[], None] | None = None
        """Called within each counted call of the model, for as long as it is set."""
        self.ahead = False
        self.steps = self.fetched = self.backwards = 0
        self.updates = 0
        """Updates counted while the loop is being learned, those of further optimizers left out."""
        self.updates_elsewhere = 0
        """Updates in other threads."""
        self.failed = ""
        """Why recording has stopped, '' while it goes on."""
        self.step_s = 0.0
        self.first_boundary = self.last_boundary = 0.0
        self.optimizers: list[Optimizer] = []
        self.loader: Any = None
        """The loader of the last training step."""
        self.iterator: Any = None
        self.probes = Probes(self, loaders)
        self.collating = CollateTimer(self.clock.now)
        self._training: set[int] = set()
        self._recent: list[int] = []
        self._hot = MarkState()
        self._segments = Segments(KEPT_STEPS, self.clock.now)
        self._segment_steps = 1
        self._starts_epoch = False
        self._other_updates = 0
        self._updates_at_fetch = 0
        self.roots = CalledModules(self.calling, self.call_hooks)

    def start(self) -> None:
        """Start recording."""
        self.probes.install()

    def stop(self) -> None:
        """Restore torch and the models."""
        self.probes.remove()
        self.roots.release()

    # -- batches (probes.Marker) ---------------------------------------------------------------------------------------

    def iterating(self, original: Function) -> Function:
        """Mark the making of an iterator; for the training loader this is the beginning of an epoch."""

        @functools.wraps(original)
        def marked(loader: Any) -> Any:
            return original(loader) if get_ident() != self.thread else self._iterate(loader, original)

        return marked

    def _iterate(self, loader: Any, original: Function) -> Any:
        training = self._is_training(loader)
        self.clock.enter("data" if training else "evaluation")
        if training and self._hot.stepped:  # starting an epoch is part of its first step
            self._boundary()
        try:
            iterator = original(loader)
        finally:
            self.clock.enter("host" if training else "evaluation")
        with contextlib.suppress(AttributeError):  # a generator, around an iterator that is marked itself
            iterator._accel_loader = loader
        if training and iterator is self.iterator:  # persistent workers reuse the iterator, which must be adopted anew
            self.iterator = self._hot.iterator = None
        return iterator

    def fetching(self, original: Function) -> Function:
        """Mark the fetching of a batch."""
        tape, now, hot = self._tape, self.clock.now, self._hot

        @functools.wraps(original)
        def marked(iterator: Any) -> Any:
            if iterator is not hot.iterator:
                return original(iterator) if get_ident() != self.thread else self._fetch(iterator, original)
            tape.append("data")
            tape.append(now())
            if hot.stepped:
                hot.stepped = False
                tape.append(STEP)
                tape.append(None)
                hot.steps_left -= 1
                if hot.steps_left <= 0:
                    self._deliver()  # a segment's first batch takes the slow path, which counts it
                    return self._fetch(iterator, original)
            try:
                batch = original(iterator)
            finally:
                tape.append("host")
                tape.append(now())
            return batch

        return marked

    def _fetch(self, iterator: Any, original: Function) -> Any:
        """Fetch a batch by the slow path."""
        clock, self._updates_at_fetch = self.clock, self.updates
        if iterator is not self.iterator and not self._adopt(iterator):
            clock.enter("evaluation")
            batch = original(iterator)
            if torch.is_grad_enabled():  # it may turn out to be a second training loader
                self._recent.append(id(iterator._accel_loader))
            return batch
        clock.enter("data")
        if self._hot.stepped:
            self._boundary()
        counting = self._hot.counting  # a step's batches are counted all or none
        self._hot.iterator = None if self.ahead or counting or not self.roots.called else iterator
        if self._starts_epoch:
            self._starts_epoch = False
            clock.mark_first()
        try:
            batch = self.collating.fetch(iterator, original)
        finally:
            if self.ahead:
                clock.skip()
            clock.enter("host" if self.roots.called else "forward")  # forward: no call of a model is marked yet
        if counting:
            clock.count(samples.of(batch))
        self.fetched += 1
        return batch

    def _adopt(self, iterator: Any) -> bool:
        """Make an iterator the loop's own if it belongs to a training loader; return whether it does."""
        loader = getattr(iterator, "_accel_loader", None)
        if loader is None or not self._is_training(loader):
            return False
        self._recent.append(id(loader))
        self.loader, self.iterator, self._starts_epoch = loader, iterator, True
        return True

    def _is_training(self, loader: Any) -> bool:
        # Before the first backward pass no loader is known; batches fetched without gradients are for an evaluation.
        return id(loader) in self._training if self._training else torch.is_grad_enabled()

    # -- the model -----------------------------------------------------------------------------------------------------

    def calling(self, target: Function, calls: list[int]) -> Function:
        """Mark an outermost call of a model, and count it in `calls[0]`."""
        tape, now, training, thread, hot = self._tape, self.clock.now, torch.is_grad_enabled, self.thread, self._hot
        # `nn.Module._call_impl` without hooks only calls `forward`. Doing so here leaves the stack as deep as it was,
        # which anomaly detection pays for in each operation, and saves a call.
        is_plain = isinstance(target, MethodType) and target.__func__ is nn.Module._call_impl
        module: Any = getattr(target, "__self__", None) if is_plain else None
        is_traced = torch._C._get_tracing_state
        before, after = module_globals._global_forward_pre_hooks, module_globals._global_forward_hooks
        before_b, after_b = module_globals._global_backward_pre_hooks, module_globals._global_backward_hooks

        def marked(*args: Any, **kwargs: Any) -> Any:
            if hot.in_call or get_ident() != thread:
                return target(*args, **kwargs)
            hot.in_call = True
            trains = training()
            if hot.counting and trains:
                calls[0] += 1
            if hot.stepped or not trains:
                self._call()
            else:
                tape.append("forward")
                tape.append(now())
            if hot.counting and trains and self.on_call is not None:
                self.on_call()
            try:
                if module is None or module._forward_hooks or module._forward_pre_hooks or is_traced():
                    return target(*args, **kwargs)
                if module._backward_hooks or module._backward_pre_hooks or before or after or before_b or after_b:
                    return target(*args, **kwargs)
                return module.forward(*args, **kwargs)
            finally:
                hot.in_call = False
                if trains:
                    tape.append("loss")
                    tape.append(now())

        return marked

    def call_hooks(self, calls: list[int]) -> tuple[Function, Function]:
        """Return forward hooks that mark a call as `calling` does, for a module whose slot is taken."""
        marking = [False]  # whether `before` marked the call that `after` ends

        def before(module: Any, args: Any) -> None:
            if self._hot.in_call or get_ident() != self.thread:
                return
            self._hot.in_call = marking[0] = True
            calls[0] += torch.is_grad_enabled()
            if self._hot.stepped or not torch.is_grad_enabled():
                self._call()
            else:
                self.clock.enter("forward")
            if self.on_call is not None and torch.is_grad_enabled():
                self.on_call()

        def after(module: Any, args: Any, output: Any) -> None:
            if marking[0] and get_ident() == self.thread:
                self._hot.in_call = marking[0] = False
                if torch.is_grad_enabled():
                    self.clock.enter("loss")

        return before, after

    def _call(self) -> None:
        if not torch.is_grad_enabled():
            self._recent.clear()  # batches fetched for an evaluation are not for training
            self.clock.enter("evaluation")
            return
        if not self._training:
            # No loader marks where a step begins: it ends where the next step's first forward pass begins.
            self.clock.enter("outside")
            self._boundary()
        self.clock.enter("forward")

    def differentiating(self, original: Function) -> Function:
        """Mark a backward pass; the loaders that batches came from since the last one are training loaders."""
        tape, now, thread, hot, recent = self._tape, self.clock.now, self.thread, self._hot, self._recent

        @functools.wraps(original)
        def marked(*args: Any, **kwargs: Any) -> Any:
            # A backward pass within one (checkpointing) belongs to it.
            if hot.in_backward or get_ident() != thread:
                return original(*args, **kwargs)
            if recent or hot.learning:
                self._differentiated()
            hot.in_backward = True
            tape.append("backward")
            tape.append(now())
            try:
                return original(*args, **kwargs)
            finally:
                hot.in_backward = False
                tape.append("optimizer" if hot.updating else "host")
                tape.append(now())

        return marked

    def _differentiated(self) -> None:
        self.backwards += 1
        self._training.update(self._recent)
        self._recent.clear()
        if not self.roots.called:
            self._book_forward()

    def _book_forward(self) -> None:
        """Book the time before this backward pass as the forward pass: no call of a model was marked.

        That is so where a compiled function, a method or bare parameters compute the loss. If no loader marks where a
        step begins either, it begins with the first backward pass after an update.
        """
        clock = self.clock
        if clock.phase in ("host", "outside"):
            clock.rename("forward")
        if self._hot.stepped and not self._training:
            clock.enter("backward")
            self._boundary()

    # -- the update ----------------------------------------------------------------------------------------------------

    def updating(self) -> tuple[Function, Function]:
        """Return the hooks before and after an optimizer's step; the second is not called if it raised."""
        tape, now, thread, hot = self._tape, self.clock.now, self.thread, self._hot

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if get_ident() == thread:
                hot.updating = True
                tape.append("optimizer")
                tape.append(now())
            else:
                self.updates_elsewhere += 1

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if hot.updating:  # only the training thread's own
                hot.updating = False
                tape.append("outside")
                tape.append(now())
                if hot.learning or optimizer is not hot.optimizer:
                    self._learn(optimizer)
                else:
                    hot.stepped = True

        return before, after

    def _learn(self, optimizer: Optimizer) -> None:
        hot = self._hot
        ends_step = self._ends_step(optimizer)
        self.updates += ends_step
        if self._training and not self.steps and self.updates - self._updates_at_fetch > _LOST:
            # The loop iterates over batches that it took from a loader earlier, so no loader ends its steps.
            self._training.clear()
            self.loader = self.iterator = hot.iterator = None
        hot.stepped = hot.stepped or ends_step or bool(self._training)
        if self._on_update is not None:
            self._on_update(optimizer)
        if not any(optimizer is other for other in self.optimizers):
            self.optimizers.append(optimizer)
            self.roots.learn(optimizer, self.steps)
        elif self.steps < _LEARNING_STEPS:
            self.roots.descend(self.steps)
        if not self.roots.called and not self._training:
            self.clock.enter("forward")

    def _ends_step(self, optimizer: Optimizer) -> bool:
        """Return whether an update ends a step that no loader ends; of two alternating optimizers only one does."""
        hot = self._hot
        if hot.optimizer is not None and optimizer is not hot.optimizer:
            self._other_updates += 1
            if self._other_updates <= _LOST:
                return False
        hot.optimizer, self._other_updates = optimizer, 0
        return True

    @property
    def on_update(self) -> Callable[[Optimizer], None] | None:
        """Called within each update, for as long as it is set."""
        return self._on_update

    @on_update.setter
    def on_update(self, callback: Callable[[Optimizer], None] | None) -> None:
        self._on_update = callback
        self._hot.learning = self._is_learning()

    def _is_learning(self) -> bool:
        return self._on_update is not None or self.steps < _LEARNING_STEPS or not self.roots.called

    # -- the rest ------------------------------------------------------------------------------------------------------

    def communicating(self, original: Function) -> Function:
        """Mark a collective that the loop calls itself."""
        return self._within("communication", original)

    def copying(self, original: Function) -> Function:
        """Mark a copy to the device."""
        marked = self._within("copy", original)

        @functools.wraps(original)
        def choosing(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return original(tensor, *args, **kwargs) if tensor.is_cuda else marked(tensor, *args, **kwargs)

        return choosing

    def _within(self, phase: str, original: Function) -> Function:
        @functools.wraps(original)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != self.thread:
                return original(*args, **kwargs)
            before = self.clock.phase
            self.clock.enter(phase)
            try:
                return original(*args, **kwargs)
            finally:
                self.clock.enter(before)

        return marked

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _boundary(self) -> None:
        hot = self._hot
        hot.stepped = False
        self._other_updates = 0
        hot.counting = not self.deferred
        self.clock.write(CUT)
        hot.steps_left -= 1
        if hot.steps_left <= 0:
            self._deliver()

    def _deliver(self) -> None:
        """Hand over the steps since the last time; an error of the profiler's own must not end the script."""
        self._guarded(self._hand_over)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.failed = f"the recorder stopped at step {self.steps}: {type(error).__name__}: {error}"
            self._hot.steps_left = sys.maxsize  # never again

    def _hand_over(self) -> None:
        hot = self._hot
        if self.deferred:
            self.steps += self._segment_steps
            self._segments.append(self._segment_steps, self.clock.detach())
            self.on_segment()
        else:
            for measured in self.clock.read():
                self.steps += 1
                self._record(measured)
        hot.steps_left = self._segment_steps = self._segments.next(self._segment_steps) if self.deferred else 1
        hot.learning = self._is_learning()
        hot.counting = True
        hot.iterator = None  # the next batch takes the slow path, which counts it
        self.clock.resume()

    def _record(self, measured: Measurement) -> None:
        self.last_boundary = self.clock.cut_at
        if measured.step == 0:
            self.first_boundary = self.last_boundary
        else:
            self.step_s += measured.seconds
        self.on_step(measured)

    def catch_up(self) -> None:
        """Parse the stored segments, call `on_step` for their steps; an error loses those after it, no more."""
        self._guarded(self._parse_stored)

    def _parse_stored(self) -> None:
        for number, segment in enumerate(self._segments):
            if number == 0 and self._segments.dropped:  # the steps before were dropped
                self.first_boundary, self.step_s, self.clock.aside_s = segment[1], 0.0, 0.0
            for measured in self.clock.read(segment):
                self._record(measured)
        self._segments.clear()
        for measured in self.clock.read():
            self._record(measured)

    def summary(self) -> str:
        """Say how much of a training loop was recorded."""
        batches = f"{self.fetched} batches from a DataLoader"
        return f"{batches}, {self.backwards} backward passes, {self.updates} updates, {self.steps} whole steps"

    def unattributed(self) -> float:
        """Return the share of the wall time, first boundary to last, that is in no step and not the profiler's own."""
        wall = self.last_boundary - self.first_boundary
        return max(0.0, 1.0 - (self.step_s + self.clock.aside_s) / wall) if wall > 0 else 0.0

    def loader_facts(self) -> LoaderFacts:
        """Describe the loader that feeds the training."""
        if not self._training or self.loader is None:
            return LoaderFacts(kind="own iterator" if self.steps else "none seen")
        return facts.of_loader(self.loader)

    def worker_pids(self) -> list[int]:
        """Return the loader's worker processes."""
        return [worker.pid for worker in getattr(self.iterator, "_workers", []) if worker.pid]
