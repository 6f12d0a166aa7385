"""Marks on the calls of the loop's models: which are the forward pass of a step, and which an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_globals

from accel.profiler.loop.batches import LoaderMarks
from accel.profiler.loop.clock import MAYBE_FORWARD, MAYBE_HOST, StepClock
from accel.profiler.loop.delivery import Delivery
from accel.profiler.loop.patches import Function


class CallMarks:
    """Marks on the models' calls.

    Args:
        clock: to write marks to.
        tape: where the quickest marks go.
        thread: the one that trains, by Python's id.
        delivery: of the steps.
        loaders: whose batches the calls take.

    Attributes:
        on_call: called within each counted call of the model, for as long as it is set.
    """

    def __init__(self, clock: StepClock, tape: Any, thread: int, delivery: Delivery, loaders: LoaderMarks) -> None:
        self._clock, self._tape, self._thread = clock, tape, thread
        self._delivery, self._hot, self._loaders = delivery, delivery.hot, loaders
        self.on_call: Callable[[], None] | None = None

    def wrapped(self, target: Function, calls: list[int]) -> Function:
        """Mark an outermost call of a model, and count it in `calls[0]`."""
        tape, now, training, thread, hot = self._tape, self._clock.now, torch.is_grad_enabled, self._thread, self._hot
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

    def hooks(self, calls: list[int]) -> tuple[Function, Function]:
        """Return forward hooks that mark a call as `wrapped` does, for a module whose slot is taken."""
        marking = [False]  # whether `before` marked the call that `after` ends

        def before(module: Any, args: Any) -> None:
            if self._hot.in_call or get_ident() != self._thread:
                return
            self._hot.in_call = marking[0] = True
            calls[0] += torch.is_grad_enabled()
            if self._hot.stepped or self._hot.away or not torch.is_grad_enabled():
                self._call(module)
            else:
                self._clock.enter("forward")
            if self.on_call is not None and torch.is_grad_enabled():
                self.on_call()

        def after(module: Any, args: Any, output: Any) -> None:
            if marking[0] and get_ident() == self._thread:
                self._hot.in_call = marking[0] = False
                if torch.is_grad_enabled():
                    self._clock.enter("loss")
                else:
                    self._called()

        return before, after

    def _call(self, module: Any) -> None:
        if not torch.is_grad_enabled():
            self._call_without_gradients(evaluates=module is not None and not module.training)
            return
        if self._hot.stepped and not self._loaders.training:
            # No loader marks where a step begins: it ends where the next step's first forward pass begins.
            self._clock.enter("outside")
            self._delivery.boundary()
        self._delivery.pauses.end_in_step()
        self._clock.enter("forward")

    def _call_without_gradients(self, *, evaluates: bool) -> None:
        """Mark a call for an evaluation, or one of the step: a generator's samples, pseudo-labels."""
        clock, loaders, code = self._clock, self._loaders, self._clock.code
        if evaluates or not loaders.training or code == "evaluation":
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

    def _called(self) -> None:
        following = {"forward": "host", MAYBE_FORWARD: MAYBE_HOST}.get(self._clock.code)
        if following is not None:
            self._clock.enter(following)
