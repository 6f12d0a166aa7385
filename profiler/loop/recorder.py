"""Turns the marks of the probes into steps: which batch belongs to training, when a step ends, where its time went.

An ordinary step runs only through the marked functions made here, which write to the clock's tape. What is rare (a new
iterator, a new optimizer, an evaluation) takes the slow path.
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
from accel.profiler.loop import called_modules, facts
from accel.profiler.loop.batches import LoaderMarks
from accel.profiler.loop.called_modules import CalledModules
from accel.profiler.loop.clock import MAYBE_FORWARD, MAYBE_HOST, PROVISIONAL, WAS, StepClock
from accel.profiler.loop.delivery import Delivery
from accel.profiler.loop.device import DeviceEvents, drained_s
from accel.profiler.loop.optimizers import Optimizers
from accel.profiler.loop.patches import Function, Loaders, Probes, has_gpu
from accel.profiler.loop.steps import LOST
from accel.profiler.loop.untraced import untraced

_LEARNING_STEPS = 12
"""Steps in which a module that is never called is replaced by its children."""
_NO_THREAD = -1


class Recorder:
    """Records the steps of an unmodified loop.

    Args:
        clock: seconds, monotonic.
        loaders: loaders that iterate in their own way, each with the class of its iterators.
        thread: the one that trains, by Python's id; default this one.

    Attributes:
        events: records the device's times; None where there is no GPU.
        has_ranks: others train in step with this one.
        updates: those counted while the loop is being learned, without those of further optimizers.
        updates_elsewhere: updates in other threads.
        model_name: the classes of the models, once recording has stopped.
    """

    def __init__(self, clock: StepClock | None = None, *, loaders: Loaders = (), thread: int | None = None) -> None:
        self.clock = clock = clock or StepClock()
        clock.backward_is_seen = True
        self.thread = get_ident() if thread is None else thread
        self.delivery = Delivery(clock, self.thread, self._is_learning)
        self.events: DeviceEvents | None = None
        if has_gpu():
            self.events = DeviceEvents(clock.write, lambda: self.delivery.steps)
            clock.write = self.events.write
        self._tape: Any = clock.tape if self.events is None else self.events
        self._on_update: Callable[[Optimizer], None] | None = None
        self.backwards = self.updates = self.updates_elsewhere = 0
        self.optimizers = Optimizers()
        self.has_ranks = False
        self._trained = facts.Trained()
        self.model_name = ""
        self.probes = Probes(self, loaders)
        self.loaders = LoaderMarks(self.delivery, self._tape, lambda: self.roots.called)
        self.loaders.drain = lambda: drained_s(self._trained.device, clock.now)
        self.calls = CallMarks(self.delivery, self._tape, self.loaders)
        self.roots = CalledModules(self.calls.wrapped, self.calls.hooks)

    def start(self) -> None:
        """Start recording."""
        self.probes.install()

    def stop(self) -> None:
        """Restore torch and the models; what the script itself puts back later only passes calls on."""
        hot = self.delivery.hot
        self.thread = self.loaders.thread = _NO_THREAD
        hot.in_backward, hot.iterator = True, None
        self.probes.remove()
        self.model_name = called_modules.name(self.roots.modules)
        self.roots.release()

    # -- the backward pass ---------------------------------------------------------------------------------------------

    def differentiating(self, original: Function) -> Function:
        """Mark a backward pass; the loaders that batches came from since the last one are training loaders."""
        tape, now, thread, hot, recent = self._tape, self.clock.now, self.thread, self.delivery.hot, self.loaders.recent

        @untraced
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
        loaders = self.loaders
        for loader in loaders.recent:
            if loader is not None:
                loaders.training.add(loader)
                loaders.has_training = True
        loaders.recent.clear()
        if loaders.pending or loaders.is_doubtful:
            loaders.settle(within=True)
        if self.roots.called:
            return
        # No call of a model was marked: a compiled function, a method or bare parameters compute the loss. The time
        # before is the forward pass then; where no loader marks where a step begins, it begins here after an update.
        clock = self.clock
        if clock.code in ("host", "outside", MAYBE_HOST):
            clock.write((WAS, "forward"))
        if self.delivery.hot.stepped and not loaders.has_training:
            clock.enter("backward")
            self.delivery.boundary()

    # -- the update ----------------------------------------------------------------------------------------------------

    def updating(self) -> tuple[Function, Function]:
        """Return the hooks before and after an optimizer's step; the second is not called if it raised."""
        tape, now, thread, hot = self._tape, self.clock.now, self.thread, self.delivery.hot

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
        hot, ending, loaders = self.delivery.hot, self.delivery.ending, self.loaders
        ends_step = ending.is_of(optimizer, has_ranks=self.has_ranks)
        hot.optimizer = ending.optimizer
        self.updates += ends_step
        loaders.since_batch += ends_step
        if loaders.has_training and not self.delivery.steps and loaders.since_batch > LOST:
            loaders.lose()
        hot.stepped = hot.stepped or ends_step or loaders.has_training
        if self._on_update is not None:
            self._on_update(optimizer)
        if not any(optimizer is other for other in self.optimizers):
            self.delivery.guarded(functools.partial(self._meet, optimizer))
        elif self.delivery.steps < _LEARNING_STEPS:
            self.roots.descend(self.delivery.steps)
        self.clock.skip()  # to look for the model takes 20 ms and more, which are not the loop's
        if not self.roots.called and not loaders.has_training:
            self.clock.enter("forward")

    def _meet(self, optimizer: Optimizer) -> None:
        """Look for the models of a new optimizer, and let go of those whose optimizers are gone."""
        self.optimizers.append(optimizer)
        self._trained = self.trained
        if self.roots.learn(optimizer, self.delivery.steps):
            self.roots.release_others({id(p) for o in self.optimizers for g in o.param_groups for p in g["params"]})

    def on_update(self, callback: Callable[[Optimizer], None] | None) -> None:
        """Call back within each update from now on; None ends that."""
        self._on_update = callback
        self.delivery.hot.learning = self._is_learning()

    def _is_learning(self) -> bool:
        return self._on_update is not None or self.delivery.steps < _LEARNING_STEPS or not self.roots.called

    # -- the rest ------------------------------------------------------------------------------------------------------

    def communicating(self, original: Function) -> Function:
        """Mark a collective that the loop calls itself."""

        @untraced
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

    def copying(self) -> Callable[[], None] | None:
        """Mark a copy to the device, unless it is part of an evaluation."""
        before = self.clock.code
        if self.thread == _NO_THREAD or before == "evaluation" or before in PROVISIONAL:
            return None
        self.clock.enter("copy")
        return functools.partial(self.clock.enter, before)

    # -- what was recorded ---------------------------------------------------------------------------------------------

    @property
    def trained(self) -> facts.Trained:
        """What is trained, or was, if the script has let go of it."""
        return facts.of_training(self.optimizers, self._trained)

    def loader_facts(self) -> LoaderFacts:
        """Describe the loader that feeds the training."""
        if not self.loaders.has_training or self.loaders.loader is None:
            return LoaderFacts(kind="own iterator" if self.delivery.steps else "none seen")
        return facts.of_loader(self.loaders.loader)

    def worker_pids(self) -> list[int]:
        """Return the loader's worker processes."""
        iterator, loader = self.loaders.iterator, self.loaders.loader
        source = loader if iterator is None else iterator  # a loader may keep them between two passes
        return [worker.pid for worker in getattr(source, "_workers", []) if worker.pid]


class CallMarks:
    """Marks on the models' calls.

    Args:
        delivery: of the steps.
        tape: where the quickest marks go.
        loaders: whose batches the calls take.

    Attributes:
        on_call: called within each call of the model with gradients, for as long as it is set.
    """

    def __init__(self, delivery: Delivery, tape: Any, loaders: LoaderMarks) -> None:
        self._clock, self._tape, self._thread = delivery.clock, tape, delivery.thread
        self._delivery, self._hot, self._loaders = delivery, delivery.hot, loaders
        self.on_call: Callable[[], None] | None = None

    def wrapped(self, target: Function, calls: list[int]) -> Function:
        """Mark an outermost call of a model, and count it in `calls[0]`."""
        thread, hot, begins, ended = self._thread, self._hot, self._begins, self._ended
        module: Any = getattr(target, "__self__", None)
        # `nn.Module._call_impl` without hooks only calls `forward`. Doing so here leaves the stack as deep as it was,
        # which anomaly detection pays for in each operation, and saves a call.
        is_plain = isinstance(target, MethodType) and target.__func__ is nn.Module._call_impl
        is_traced = torch._C._get_tracing_state
        before, after = module_globals._global_forward_pre_hooks, module_globals._global_forward_hooks
        before_b, after_b = module_globals._global_backward_pre_hooks, module_globals._global_backward_hooks

        def marked(*args: Any, **kwargs: Any) -> Any:
            if hot.in_call or get_ident() != thread:
                return target(*args, **kwargs)
            begins(module, calls)
            try:
                if not is_plain or module._forward_hooks or module._forward_pre_hooks or is_traced():
                    return target(*args, **kwargs)
                if module._backward_hooks or module._backward_pre_hooks or before or after or before_b or after_b:
                    return target(*args, **kwargs)
                return module.forward(*args, **kwargs)
            finally:
                ended()

        return marked

    def hooks(self, calls: list[int]) -> tuple[Function, Function]:
        """Return forward hooks that mark a call as `wrapped` does, for a module whose slot is taken."""
        marking = [False]  # whether `before` marked the call that `after` ends

        def before(module: Any, args: Any) -> None:
            if not self._hot.in_call and get_ident() == self._thread:
                marking[0] = True
                self._begins(module, calls)

        def after(module: Any, args: Any, output: Any) -> None:
            if marking[0] and get_ident() == self._thread:
                marking[0] = False
                self._ended()

        return before, after

    def _begins(self, module: Any, calls: list[int]) -> None:
        hot, tape, trains = self._hot, self._tape, torch.is_grad_enabled()
        hot.in_call = True
        calls[0] += trains
        if hot.stepped or hot.away or not trains:
            self._call(module)
        else:
            tape.append("forward")
            tape.append(self._clock.now())
        if trains and self.on_call is not None:
            self.on_call()

    def _ended(self) -> None:
        self._hot.in_call = False
        if torch.is_grad_enabled():
            self._tape.append("loss")
            self._tape.append(self._clock.now())
            return
        following = {"forward": "host", MAYBE_FORWARD: MAYBE_HOST}.get(self._clock.code)
        if following is not None:
            self._clock.enter(following)

    def _call(self, module: Any) -> None:
        if not torch.is_grad_enabled():
            self._call_without_gradients(evaluates=isinstance(module, nn.Module) and not module.training)
            return
        if self._hot.stepped and not self._loaders.has_training:
            # No loader marks where a step begins: it ends where the next step's first forward pass begins.
            self._clock.enter("outside")
            self._delivery.boundary()
        self._delivery.pauses.end_in_step()
        self._clock.enter("forward")

    def _call_without_gradients(self, *, evaluates: bool) -> None:
        """Mark a call for an evaluation, or one of the step: a generator's samples, pseudo-labels."""
        clock, loaders, code = self._clock, self._loaders, self._clock.code
        if evaluates or not loaders.has_training or code == "evaluation":
            if loaders.pending or loaders.is_doubtful:
                loaders.settle(within=False)
            loaders.recent.clear()  # batches fetched for an evaluation are not for training
            clock.enter("evaluation")
            self._delivery.pauses.begin()
        elif code in ("host", "loss") and not self._hot.stepped:  # with a batch in hand
            clock.enter("forward")
        else:
            loaders.is_doubtful = True
            if not loaders.recent:
                loaders.recent.append(None)
            clock.enter(MAYBE_FORWARD)
            self._delivery.pauses.begin()
