"""Turns what the probes tell into steps: which batch belongs to training, when a step ends, where its time went.

An ordinary step runs only through the marked functions made here, which write to the clock's tape: 6 µs a step in all,
measured on a step of 70 µs, of which 3 are the least that functions in these places take if they look at nothing. (One
after the other, without a step between, its marks take 0.8 µs; the rest is what was in the caches before. One flag for
all states, bits, fewer globals, a tape for each phase: none made a difference above 0.3 µs.) What is rare (a new
iterator, a new optimizer, an evaluation) takes the slow way.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import deque
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
from accel.profiler.clocks.segments import Segments
from accel.profiler.evidence import LoaderFacts
from accel.profiler.phases import CUT, STEP, Measurement, PairTape, StepClock, Tape

_KEPT_STEPS = 20_000
_LEARNING_STEPS = 12
"""Steps in which a module that is never called is replaced by its children."""
_LOST = 50
"""Updates by others after which the optimizer that ended steps is held to be gone; before the first step has ended,
updates without a batch after which the loader is."""


class Recorder:
    """Record an unmodified loop's steps.

    Args:
        clock: seconds, monotonic.
        loaders: loaders that iterate in their own way, each with the class of its iterators.

    Attributes:
        on_step: called between two steps with the step just ended; its time belongs to no step.
        on_look: called between two steps in place of `on_step` while `late` is set, every 64 to 512 steps.
        late: True keeps the tape unread: reading it costs 4 µs a step. `catch_up` tells `on_step` of these steps.
        ahead: True fetches the batches of the open step while its clock stands.
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
        self.on_look: Callable[[], None] = lambda: None
        self.late = False
        self._on_update: Callable[[Optimizer], None] | None = None
        self.on_call: Callable[[], None] | None = None
        """Called within each counted call of the model, for as long as it is set."""
        self.ahead = False
        self.steps = self.fetched = self.backwards = 0
        self.updates = 0
        """Updates seen until steps are known well, those of further optimizers left out."""
        self.elsewhere = 0
        """Updates in other threads."""
        self.failed = ""
        """Why it records no more, '' while it does."""
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
        self._segments = Segments(_KEPT_STEPS, self.clock.now)
        self._piece = 1
        self._new = False
        self._others = 0
        self._asked_at = 0
        self.roots = CalledModules(self.calling, self.call_hooks)

    def start(self) -> None:
        """Begin to record."""
        self.probes.install()

    def stop(self) -> None:
        """Leave torch and the models as they were."""
        self.probes.remove()
        self.roots.release()

    # -- batches (probes.Ear) ------------------------------------------------------------------------------------------

    def iterating(self, original: Function) -> Function:
        """Mark the making of an iterator; for the training loader this is the beginning of an epoch."""

        @functools.wraps(original)
        def marked(loader: Any) -> Any:
            return original(loader) if get_ident() != self.thread else self._iterate(loader, original)

        return marked

    def _iterate(self, loader: Any, original: Function) -> Any:
        training = self._is_training(loader)
        self.clock.enter("data" if training else "evaluation")
        if training and self._hot.stepped:
            self._boundary()
        try:
            iterator = original(loader)
        finally:
            self.clock.enter("host" if training else "evaluation")
        with contextlib.suppress(AttributeError):  # a generator around the iterator, which tells for itself
            iterator._accel_loader = loader
        if training and iterator is self.iterator:  # persistent workers come with the same iterator
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
                hot.left -= 1
                if hot.left <= 0:
                    self._deliver()
                    return self._fetch(iterator, original)
            try:
                batch = original(iterator)
            finally:
                tape.append("host")
                tape.append(now())
            return batch

        return marked

    def _fetch(self, iterator: Any, original: Function) -> Any:
        """Fetch a batch the slow way."""
        clock, self._asked_at = self.clock, self.updates
        if iterator is not self.iterator and not self._takes(iterator):
            clock.enter("evaluation")
            batch = original(iterator)
            if torch.is_grad_enabled():  # it may be a second training loader
                self._recent.append(id(iterator._accel_loader))
            return batch
        clock.enter("data")
        if self._hot.stepped:
            self._boundary()
        counting = self._hot.counting  # a step's batches are counted all or none
        self._hot.iterator = None if self.ahead or counting or not self.roots.called else iterator
        if self._new:
            self._new = False
            clock.mark_first()
        try:
            batch = self.collating.fetch(iterator, original)
        finally:
            if self.ahead:
                clock.skip()
            clock.enter("host" if self.roots.called else "forward")
        if counting:
            clock.count(samples.of(batch))
        self.fetched += 1
        return batch

    def _takes(self, iterator: Any) -> bool:
        """Tell whether an iterator is a training loader's; it is the loop's iterator then."""
        loader = getattr(iterator, "_accel_loader", None)
        if loader is None or not self._is_training(loader):
            return False
        self._recent.append(id(loader))
        self.loader, self.iterator, self._new = loader, iterator, True
        return True

    def _is_training(self, loader: Any) -> bool:
        # Before the first backward pass nothing is known; what is fetched without gradients is for an evaluation.
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
            if hot.inside or get_ident() != thread:
                return target(*args, **kwargs)
            hot.inside = True
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
                hot.inside = False
                if trains:
                    tape.append("loss")
                    tape.append(now())

        return marked

    def call_hooks(self, calls: list[int]) -> tuple[Function, Function]:
        """Return forward hooks that mark a call as `calling` does, for a module whose slot is taken."""
        marking = [False]

        def before(module: Any, args: Any) -> None:
            if self._hot.inside or get_ident() != self.thread:
                return
            self._hot.inside = marking[0] = True
            calls[0] += torch.is_grad_enabled()
            if self._hot.stepped or not torch.is_grad_enabled():
                self._call()
            else:
                self.clock.enter("forward")
            if self.on_call is not None and torch.is_grad_enabled():
                self.on_call()

        def after(module: Any, args: Any, output: Any) -> None:
            if marking[0] and get_ident() == self.thread:
                self._hot.inside = marking[0] = False
                if torch.is_grad_enabled():
                    self.clock.enter("loss")

        return before, after

    def _call(self) -> None:
        if not torch.is_grad_enabled():
            self._recent.clear()  # what was fetched for this is no training batch
            self.clock.enter("evaluation")
            return
        if not self._training:
            # No loader tells where a step begins: it ends where the next one's first forward pass does.
            self.clock.enter("outside")
            self._boundary()
        self.clock.enter("forward")

    def differentiating(self, original: Function) -> Function:
        """Mark a backward pass; the loaders that were asked since the last one feed the training."""
        tape, now, thread, hot, recent = self._tape, self.clock.now, self.thread, self._hot, self._recent

        @functools.wraps(original)
        def marked(*args: Any, **kwargs: Any) -> Any:
            # A backward pass within one (checkpointing) belongs to it.
            if hot.inside_backward or get_ident() != thread:
                return original(*args, **kwargs)
            if recent or hot.learning:
                self._differentiated()
            hot.inside_backward = True
            tape.append("backward")
            tape.append(now())
            try:
                return original(*args, **kwargs)
            finally:
                hot.inside_backward = False
                tape.append("optimizer" if hot.updating else "host")
                tape.append(now())

        return marked

    def _differentiated(self) -> None:
        self.backwards += 1
        self._training.update(self._recent)
        self._recent.clear()
        if not self.roots.called:
            self._forward_unseen()

    def _forward_unseen(self) -> None:
        """Book what came before this backward pass as the forward pass: no model was called by its own call.

        That is so where a compiled function, a method or bare parameters make the loss. No loader tells where a step
        begins, no call either: it begins with the first backward pass after an update.
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

        def begins(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if get_ident() == thread:
                hot.updating = True
                tape.append("optimizer")
                tape.append(now())
            else:
                self.elsewhere += 1

        def ended(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if hot.updating:  # only the training thread's own
                hot.updating = False
                tape.append("outside")
                tape.append(now())
                if hot.learning or optimizer is not hot.optimizer:
                    self._learn(optimizer)
                else:
                    hot.stepped = True

        return begins, ended

    def _learn(self, optimizer: Optimizer) -> None:
        hot = self._hot
        leads = self._leads(optimizer)
        self.updates += leads
        if self._training and not self.steps and self.updates - self._asked_at > _LOST:
            # The loop goes over batches that it took from a loader before, and no loader ends its steps.
            self._training.clear()
            self.loader = self.iterator = hot.iterator = None
        hot.stepped = hot.stepped or leads or bool(self._training)
        if self._on_update is not None:
            self._on_update(optimizer)
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)
            self.roots.learn(optimizer, self.steps)
        elif self.steps < _LEARNING_STEPS:
            self.roots.descend(self.steps)
        if not self.roots.called and not self._training:
            self.clock.enter("forward")

    def _leads(self, optimizer: Optimizer) -> bool:
        """Tell whether an update ends a step that no loader ends; of two optimizers in turns, only one's does."""
        hot = self._hot
        if hot.optimizer is not None and optimizer is not hot.optimizer:
            self._others += 1
            if self._others <= _LOST:
                return False
        hot.optimizer, self._others = optimizer, 0
        return True

    @property
    def on_update(self) -> Callable[[Optimizer], None] | None:
        """Called within each update, for as long as it is set."""
        return self._on_update

    @on_update.setter
    def on_update(self, look: Callable[[Optimizer], None] | None) -> None:
        self._on_update = look
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
        self._others = 0
        hot.counting = not self.late
        self.clock.write(CUT)
        hot.left -= 1
        if hot.left <= 0:
            self._deliver()

    def _deliver(self) -> None:
        """Hand over what has ended since the last time; a fault of the profiler's own must not end the script."""
        try:
            self._hand_over()
        except Exception as error:
            self.failed = f"the recorder stopped at step {self.steps}: {type(error).__name__}: {error}"
            self._hot.left = sys.maxsize

    def _hand_over(self) -> None:
        hot = self._hot
        if self.late:
            self.steps += self._piece
            self._segments.append(self._piece, self.clock.tear())
            self.on_look()
        else:
            for measured in self.clock.read():
                self.steps += 1
                self._ended(measured)
        hot.left = self._piece = self._segments.next(self._piece) if self.late else 1
        hot.learning = self._is_learning()
        hot.counting = True
        hot.iterator = None
        self.clock.resume()

    def _ended(self, measured: Measurement) -> None:
        self.last_boundary = self.clock.cut_at
        if measured.step == 0:
            self.first_boundary = self.last_boundary
        else:
            self.step_s += measured.seconds
        self.on_step(measured)

    def catch_up(self) -> None:
        """Tell of the steps that were put by, once the loop is over."""
        for number, torn in enumerate(self._segments):
            if number == 0 and self._segments.dropped:  # what came before is out of the account
                self.first_boundary, self.step_s, self.clock.aside_s = torn[1], 0.0, 0.0
            for measured in self.clock.read(torn):
                self._ended(measured)
        self._segments.clear()
        for measured in self.clock.read():
            self._ended(measured)

    def seen(self) -> str:
        """Say what of a training loop was seen."""
        seen = f"{self.fetched} batches from a DataLoader, {self.backwards} backward passes, {self.updates} updates"
        return f"{seen}, {self.steps} whole steps"

    def unattributed(self) -> float:
        """Return the share of the wall time, first boundary to last, that is in no step and was not the profiler's."""
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


def kept_steps() -> deque[Measurement]:
    """Return a list that holds the last 20,000 steps: 20 MB."""
    return deque(maxlen=_KEPT_STEPS)
