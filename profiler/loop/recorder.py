"""Turns the marks of the probes into steps: which batch belongs to training, when a step ends, where its time went.

An ordinary step runs only through the marked functions made here, which write to the clock's tape: 6 µs a step in all,
measured on a step of 70 µs, of which 3 are the least that functions in these places take if they check nothing. (In
isolation, without a step between them, the marks of a step take 0.8 µs; the rest is what the step evicts from the
caches. One flag for all states, bits, fewer globals, a tape for each phase: none made a difference above 0.3 µs.) What
is rare (a new iterator, a new optimizer, an evaluation) takes the slow path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_globals
from torch.optim import Optimizer

from accel.profiler.evidence import LoaderFacts
from accel.profiler.loop import facts
from accel.profiler.loop.batches import BatchMarks
from accel.profiler.loop.called_modules import CalledModules, RegisteredModules
from accel.profiler.loop.clock import MAYBE_FORWARD, MAYBE_HOST, PROVISIONAL, StepClock
from accel.profiler.loop.device import DeviceEvents, drained_s, marked_copy
from accel.profiler.loop.optimizers import Optimizers
from accel.profiler.loop.patches import Function, Loaders, Probes, has_gpu
from accel.profiler.loop.steps import LOST

_LEARNING_STEPS = 12
"""Steps in which a module that is never called is replaced by its children."""
_NO_THREAD = -1


class Recorder(BatchMarks):
    """Records the steps of an unmodified loop.

    Args:
        clock: seconds, monotonic.
        loaders: loaders that iterate in their own way, each with the class of its iterators.
        thread: the one that trains, by Python's id; default this one.
    """

    def __init__(self, clock: StepClock | None = None, *, loaders: Loaders = (), thread: int | None = None) -> None:
        super().__init__(clock or StepClock(), get_ident() if thread is None else thread)
        self.clock.backward_is_seen = True
        self.events: DeviceEvents | None = None
        if has_gpu():
            self.events = DeviceEvents(self.clock.write, lambda: self.steps)
            self.clock.write = self.events.write
        self._tape: Any = self.clock.tape if self.events is None else self.events
        self._on_update: Callable[[Optimizer], None] | None = None
        self.on_call: Callable[[], None] | None = None
        """Called within each counted call of the model, for as long as it is set."""
        self.backwards = 0
        self.updates = 0
        """Updates counted while the loop is being learned, those of further optimizers left out."""
        self.updates_elsewhere = 0
        """Updates in other threads."""
        self.optimizers = Optimizers()
        """Those that the script still has."""
        self.has_ranks = False
        """Others train in step with this one."""
        self._trained = facts.Trained()
        self.probes = Probes(self, loaders)
        self.drain = lambda: drained_s(self._trained.device, self.clock.now)
        self._registered = RegisteredModules()
        self.roots = CalledModules(self.calling, self.call_hooks, self._registered.seen)

    def start(self) -> None:
        """Start recording."""
        self._registered.start()
        self.probes.install()

    def stop(self) -> None:
        """Restore torch and the models; what the script itself puts back later only passes calls on."""
        self.thread, self._hot.in_backward, self._hot.iterator = _NO_THREAD, True, None
        self._registered.stop()
        self.probes.remove()
        self.roots.release()

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
            if hot.stepped or hot.away or not trains:
                self._call(module)
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
                else:
                    self._called()

        return marked

    def call_hooks(self, calls: list[int]) -> tuple[Function, Function]:
        """Return forward hooks that mark a call as `calling` does, for a module whose slot is taken."""
        marking = [False]  # whether `before` marked the call that `after` ends

        def before(module: Any, args: Any) -> None:
            if self._hot.in_call or get_ident() != self.thread:
                return
            self._hot.in_call = marking[0] = True
            calls[0] += torch.is_grad_enabled()
            if self._hot.stepped or self._hot.away or not torch.is_grad_enabled():
                self._call(module)
            else:
                self.clock.enter("forward")
            if self.on_call is not None and torch.is_grad_enabled():
                self.on_call()

        def after(module: Any, args: Any, output: Any) -> None:
            if marking[0] and get_ident() == self.thread:
                self._hot.in_call = marking[0] = False
                if torch.is_grad_enabled():
                    self.clock.enter("loss")
                else:
                    self._called()

        return before, after

    def _call(self, module: Any) -> None:
        if not torch.is_grad_enabled():
            self._call_without_gradients(evaluates=module is not None and not module.training)
            return
        if self._hot.stepped and not self._training:
            # No loader marks where a step begins: it ends where the next step's first forward pass begins.
            self.clock.enter("outside")
            self._boundary()
        self.clock.enter("forward")

    def _call_without_gradients(self, *, evaluates: bool) -> None:
        """Mark a call for an evaluation, or one of the step: a generator's samples, pseudo-labels."""
        clock, code = self.clock, self.clock.code
        if evaluates or not self._training or code == "evaluation":
            if self._pending or self._is_doubtful:
                self._settle(within=False)
            self._recent.clear()  # batches fetched for an evaluation are not for training
            clock.enter("evaluation")
            self.pauses.begin()
        elif code in ("host", "loss") and not self._hot.stepped:  # with a batch in hand
            clock.enter("forward")
        else:
            self._is_doubtful = True
            if not self._recent:
                self._recent.append(None)
            clock.enter(MAYBE_FORWARD)
            self.pauses.begin()

    def _called(self) -> None:
        following = {"forward": "host", MAYBE_FORWARD: MAYBE_HOST}.get(self.clock.code)
        if following is not None:
            self.clock.enter(following)

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
        for loader in self._recent:
            if loader is not None:
                self._training.add(loader)
        self._recent.clear()
        if self._pending or self._is_doubtful:
            self._settle(within=True)
        if not self.roots.called:
            self._book_forward()

    def _book_forward(self) -> None:
        """Book the time before this backward pass as the forward pass: no call of a model was marked.

        That is so where a compiled function, a method or bare parameters compute the loss. If no loader marks where a
        step begins either, it begins with the first backward pass after an update.
        """
        clock = self.clock
        if clock.code in ("host", "outside", MAYBE_HOST):
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
                if hot.learning or optimizer is not hot.optimizer():
                    self._learn(optimizer)
                else:
                    hot.stepped = True

        return before, after

    def _learn(self, optimizer: Optimizer) -> None:
        hot = self._hot
        ends_step = self._ending.is_of(optimizer, has_ranks=self.has_ranks)
        hot.optimizer = self._ending.optimizer
        self.updates += ends_step
        if self._training and not self.steps and self.updates - self._updates_at_fetch > LOST:
            # The loop iterates over batches that it took from a loader earlier, so no loader ends its steps.
            self._training.clear()
            self.loader = None
            self._forget_iterator()
        hot.stepped = hot.stepped or ends_step or bool(self._training)
        if self._on_update is not None:
            self._on_update(optimizer)
        if not any(optimizer is other for other in self.optimizers):
            self._guarded(functools.partial(self._meet, optimizer))
        elif self.steps < _LEARNING_STEPS:
            self.roots.descend(self.steps)
        self.clock.skip()  # to look for the model takes 20 ms and more, which are not the loop's
        if not self.roots.called and not self._training:
            self.clock.enter("forward")

    def _meet(self, optimizer: Optimizer) -> None:
        """Look for the models of a new optimizer, and let go of those whose optimizers are gone."""
        self.optimizers.append(optimizer)
        self._trained = self.trained
        if self.roots.learn(optimizer, self.steps):
            self.roots.release_others({id(p) for o in self.optimizers for g in o.param_groups for p in g["params"]})

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

        @functools.wraps(original)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != self.thread:
                return original(*args, **kwargs)
            before = self.clock.code
            self.clock.enter("communication")
            try:
                return original(*args, **kwargs)
            finally:
                self.clock.enter(before)

        return marked

    def copying(self, original: Function) -> Function:
        """Mark a copy to the device, unless it is part of an evaluation."""

        def copying() -> Callable[[], None] | None:
            before = self.clock.code
            if self.thread == _NO_THREAD or before == "evaluation" or before in PROVISIONAL:
                return None
            self.clock.enter("copy")
            return functools.partial(self.clock.enter, before)

        return marked_copy(original, copying, self.thread)

    # -- what was recorded ---------------------------------------------------------------------------------------------

    def summary(self) -> str:
        """Say how much of a training loop was recorded."""
        batches = f"{self.fetched} batches from a DataLoader"
        return f"{batches}, {self.backwards} backward passes, {self.updates} updates, {self.steps} whole steps"

    @property
    def trained(self) -> facts.Trained:
        """What is trained, or was, if the script has let go of it."""
        return facts.of_training(self.optimizers, self._trained)

    def loader_facts(self) -> LoaderFacts:
        """Describe the loader that feeds the training."""
        if not self._training or self.loader is None:
            return LoaderFacts(kind="own iterator" if self.steps else "none seen")
        return facts.of_loader(self.loader)

    def worker_pids(self) -> list[int]:
        """Return the loader's worker processes."""
        source = self.loader if self.iterator is None else self.iterator  # a loader may keep them between two passes
        return [worker.pid for worker in getattr(source, "_workers", []) if worker.pid]
