"""The loss scale: it keeps small gradients of float16 from becoming zero, and learns from steps that overflowed.

    scale ← scale · backoff   after `hysteresis` overflows in a row,   scale · growth   after `interval` good steps

It is applied where values leave the model, to their gradients, so that the loop's loss stays as it is; what flows back
out of the model, through its inputs, is divided by it. All of it is computed on the device: nothing waits.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018; the hysteresis is Megatron-LM's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from accel.amp.gradients import any_value
from accel.errors import InvalidArgument


class DynamicLossScale:
    """A factor on gradients that halves when they overflow, and doubles when they haven't for long.

    Args:
        initial: the first scale, a power of two; default 2¹⁶.
        growth: factor after `interval` steps without overflow, ≥ 1; default 2. 1 keeps the scale from growing.
        backoff: factor after an overflow, in (0, 1]; default 0.5. 1 keeps it from falling.
        interval: steps without overflow before it grows; default 2000.
        least: the smallest scale; default 1.
        most: the largest; default 2²⁴.
        hysteresis: overflows in a row before it falls; default 1.

    Raises:
        InvalidArgument: if a number is out of its range.

    Example:
        >>> scale = DynamicLossScale(initial=1024.0, interval=500)
        >>> scale.update(torch.tensor(1.0))
        >>> float(scale.value)
        512.0
    """

    def __init__(
        self,
        *,
        initial: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        least: float = 1.0,
        most: float = 2.0**24,
        hysteresis: int = 1,
    ) -> None:
        if not 0 < least <= initial <= most:
            raise InvalidArgument(f"0 < least <= initial <= most must hold. Found: {least:g}, {initial:g}, {most:g}.")
        if growth < 1 or not 0 < backoff <= 1:
            raise InvalidArgument(f"growth must be at least 1 and backoff in (0, 1]. Found: {growth:g}, {backoff:g}.")
        if interval < 1 or hysteresis < 1:
            raise InvalidArgument(f"interval and hysteresis must be at least 1. Found: {interval}, {hysteresis}.")
        self._growth, self._backoff, self._interval = growth, backoff, interval
        self._least, self._most, self._hysteresis = least, most, hysteresis
        self.value = torch.tensor(float(initial))
        """The scale now, float32 of no dimension, on the model's device."""
        self._good_steps = torch.tensor(0)
        self._overflows_left = torch.tensor(hysteresis)
        # On the device, as all that decides: a captured step notes its overflow where no Python runs.
        self._noted, self._overflow = torch.tensor(False), torch.tensor(False)
        self._may_be_noted = False
        self._task = -1
        self._is_passing, self._is_taken = False, False
        """A backward pass is under way through it, and a step within that has come."""
        self.came_through = False
        """A gradient has come through it since the last step."""
        self.on_forward: list[Callable[[], None]] = []
        """Called for each tensor whose gradient will be multiplied."""
        self.on_backward: list[Callable[[], None]] = []
        """Called once in each backward pass, when the first gradient comes through it."""
        self.on_create_graph: list[Callable[[], None]] = []
        """Called for each gradient that comes through it and may be differentiated again."""
        self.holds: list[Callable[[], bool]] = []
        """Asked before it changes: whether it must stay."""
        self.waiting: list[Callable[[], list[Tensor]]] = []
        """Asked before it changes: gradients that are scaled by it and wait for their step, unless they are zeros."""

    def get_scale(self) -> float:
        """Return the scale as a number, as GradScaler does: within a backward pass that of its gradients.

        What the last step overflowed counts once the next backward pass has begun. This waits for the device.
        """
        return float(self.value)

    def to(self, device: torch.device) -> None:
        """Move it to a device."""
        for name in ("value", "_good_steps", "_overflows_left", "_noted", "_overflow"):
            setattr(self, name, getattr(self, name).to(device))

    def multiply(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return `x`, whose gradient will be multiplied by the scale.

        Args:
            x: floating point.
            dtype: of what is returned; default that of `x`. The gradient is then multiplied and cast in one pass.
        """
        for listener in self.on_forward:
            listener()
        scaled: Tensor = _Multiplied.apply(x, self, dtype or x.dtype)  # type: ignore[no-untyped-call]
        return scaled

    def divide(self, x: Tensor) -> Tensor:
        """Return `x`, whose gradient will be divided by the scale."""
        divided: Tensor = _Divided.apply(x, self)  # type: ignore[no-untyped-call]
        return divided

    @torch.no_grad()
    def note(self, overflow: Tensor) -> None:
        """Note whether a step overflowed, != 0 if so; taken into account when the next backward pass begins.

        Several are taken for one, as those of several optimizers in one step of the loop.
        """
        self._overflow.logical_or_(overflow.detach().to(self.value.device).reshape(()) != 0)
        self._noted.fill_(True)
        self._may_be_noted = True
        # Others may step within the pass that is under way too, each after gradients of its own.
        self.came_through = self._is_taken = self._is_passing

    @torch.no_grad()
    def update(self, overflow: Tensor) -> None:
        """Take a step into account.

        Args:
            overflow: of one element; != 0 if its gradients were not finite.
        """
        self._become(self._after(overflow.to(self.value.device).reshape(()) != 0))

    def _after(self, bad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scale, good steps and overflows left after a step."""
        left = torch.where(bad, self._overflows_left - 1, self._hysteresis)
        good_steps = torch.where(bad, 0, self._good_steps + 1)
        grows = good_steps >= self._interval
        factor = torch.where(bad & (left <= 0), self._backoff, torch.where(grows, self._growth, 1.0))
        return (self.value * factor).clamp(self._least, self._most), torch.where(grows, 0, good_steps), left

    def _become(self, values: tuple[Tensor, Tensor, Tensor]) -> None:
        # In place: optimizers and captured graphs hold these tensors.
        for own, value in zip((self.value, self._good_steps, self._overflows_left), values, strict=True):
            own.copy_(value)

    def _settled(self, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scale, good steps and overflows left with what was noted taken into account, if it counts."""
        before = self.value, self._good_steps, self._overflows_left
        after = self._after(self._overflow)
        scale, good_steps, left = (torch.where(counts, b, a) for a, b in zip(before, after, strict=True))
        return scale, good_steps, left

    @torch.no_grad()
    def settle(self) -> None:
        """Take the steps into account that were noted, unless scaled gradients still wait for theirs."""
        if any(holds() for holds in self.holds):
            return
        waiting = [gradient for each in self.waiting for gradient in each()]
        if not waiting:
            self._become(self._settled(self._noted))
            self._forget()
        elif self._may_be_noted:  # else their values are not worth a look
            held = any_value(waiting, self.value.device)
            self._become(self._settled(self._noted & ~held))
            self._noted.logical_and_(held)
            self._overflow.logical_and_(held)

    def _forget(self) -> None:
        self._noted.fill_(False)
        self._overflow.fill_(False)
        self._may_be_noted = False

    def _begin_backward(self) -> None:
        """Be called when a gradient comes through."""
        task = torch._C._current_graph_task_id()
        if task != -1 and task == self._task:
            return
        self._task, self.came_through, self._is_passing = task, True, task != -1
        if task != -1:
            # To the end of this pass: what is checkpointed within it may have its gradients in a task of its own.
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(self._end_backward))
        for listener in self.on_backward:
            listener()
        self._is_taken = False
        self.settle()  # after them: each may note a step that the loop has left out, and these count as one

    def _end_backward(self) -> None:
        self._is_passing = False
        self.came_through = self.came_through and not self._is_taken

    def state_dict(self) -> dict[str, float]:
        """Return what it has learnt, as numbers; this waits for the device, and changes nothing."""
        scale, good_steps, left = self._settled(self._noted)
        fixed = {"is_fixed": True} if self._growth == self._backoff == 1.0 else {}
        return {"scale": float(scale), "good_steps": int(good_steps), "overflows_left": int(left), **fixed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            InvalidArgument: if it is something else; nothing has been changed then.
        """
        try:
            scale, good, left = float(state["scale"]), int(state["good_steps"]), int(state["overflows_left"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(f"a loss scale's state has three numbers. Found: {state!r} ({error}).") from None
        self.value.fill_(scale)
        self._good_steps.fill_(good)
        self._overflows_left.fill_(left)
        self._forget()


class _Multiplied(torch.autograd.Function):
    """x in a dtype, with its gradient multiplied by the scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: DynamicLossScale, dtype: torch.dtype) -> Tensor:
        ctx.scale, ctx.dtype = scale, x.dtype
        return x.view_as(x) if x.dtype == dtype else x.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.scale._begin_backward()
        (grad,), value = grads, ctx.scale.value.to(grads[0].device)
        if torch.is_grad_enabled():  # create_graph=True
            for listener in ctx.scale.on_create_graph:
                listener()
        if torch.is_grad_enabled() or grad.dtype == ctx.dtype or type(grad) is not Tensor:
            return (grad * value).to(ctx.dtype), None, None
        # In one pass: a language model's logits take gigabytes, and the product alone would be another pass over them.
        return torch.mul(grad, value, out=torch.empty_like(grad, dtype=ctx.dtype)), None, None


class _Divided(torch.autograd.Function):
    """x, with its gradient divided by the scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: DynamicLossScale) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.scale.value.to(grads[0].device), None
