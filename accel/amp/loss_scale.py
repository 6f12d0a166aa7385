"""The loss scale: it keeps small gradients of float16 from becoming zero, and learns from steps that overflowed.

    scale ← scale · backoff   after `hysteresis` overflows in a row,   scale · growth   after `interval` good steps

It multiplies gradients where they enter the model, at its outputs, and is divided out where they
leave it, at weights and inputs (`casts.py`), so the loop's loss and its gradients stay as they are.
It is computed on the device: nothing waits.

A step of any optimizer with a gradient of a scaled model that is not finite is skipped. Gradients
are looked at when it begins; nothing is remembered of backward passes. Optimizers that know
`found_inf`, as torch's fused ones and those of `accel.optim`, are told; any other finds no
gradients in a step that is skipped, at the cost of one number read.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018; the hysteresis is Megatron-LM's.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from accel.errors import InvalidArgument
from accel.profiler import renamed
from accel.profiler.errors import check_numbers
from accel.profiler.loop.update_hooks import UPDATES


class DynamicLossScale:
    """A factor on gradients that halves when they overflow, and doubles when they haven't for long.

    Args:
        init_scale: the first scale, a power of two; default 2¹⁶.
        growth_factor: factor after `growth_interval` steps without overflow, ≥ 1; default 2. 1 keeps it from growing.
        backoff_factor: factor after an overflow, in (0, 1]; default 0.5. 1 keeps it from falling.
        growth_interval: steps without overflow before it grows; default 2000.
        min_scale: the smallest scale; default 1.
        max_scale: the largest; default 2²⁴.
        hysteresis: overflows in a row before it falls; default 1.

    Raises:
        InvalidArgument: if a number is out of its range.

    Example:
        >>> scale = DynamicLossScale(init_scale=1024.0, growth_interval=500)
        >>> scale.update(torch.tensor(1.0))
        >>> float(scale.value)
        512.0
    """

    @renamed.arguments(
        **{"initial": "init_scale", "growth": "growth_factor", "backoff": "backoff_factor"},
        **{"interval": "growth_interval", "least": "min_scale", "most": "max_scale"},
    )
    def __init__(
        self,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        hysteresis: int = 1,
    ) -> None:
        check_numbers(init_scale=init_scale, growth_factor=growth_factor, backoff_factor=backoff_factor)
        check_numbers(growth_interval=growth_interval, min_scale=min_scale, max_scale=max_scale, hysteresis=hysteresis)
        if not 0 < min_scale <= init_scale <= max_scale:
            raise InvalidArgument(
                "0 < min_scale <= init_scale <= max_scale must hold. Found: "
                f"{min_scale:g}, {init_scale:g}, {max_scale:g}."
            )
        if growth_factor < 1 or not 0 < backoff_factor <= 1:
            raise InvalidArgument(
                "growth_factor must be at least 1 and backoff_factor in (0, 1]. Found: "
                f"{growth_factor:g}, {backoff_factor:g}."
            )
        if growth_interval < 1 or hysteresis < 1:
            raise InvalidArgument(
                f"growth_interval and hysteresis must be at least 1. Found: {growth_interval}, {hysteresis}."
            )
        self._growth, self._backoff, self._interval = growth_factor, backoff_factor, growth_interval
        self._least, self._most, self._hysteresis = min_scale, max_scale, hysteresis
        self.value = torch.tensor(float(init_scale))
        """The scale now, float32 of no dimension, on the model's device."""
        self._good_steps = torch.tensor(0)
        self._overflows_left = torch.tensor(hysteresis)
        # On the device, as all that decides: a captured step notes its overflow where no Python runs.
        self._noted, self._overflow = torch.tensor(False), torch.tensor(False)
        self._may_be_noted = False

    def to(self, device: torch.device) -> None:
        """Move it to a device."""
        for name in ("value", "_good_steps", "_overflows_left", "_noted", "_overflow"):
            setattr(self, name, getattr(self, name).to(device))

    @torch.no_grad()
    def of_call(self) -> Tensor:
        """Take the steps into account that were noted, and return the scale of a call of the model that begins.

        A copy: the call's gradients are multiplied and divided by the same number, whatever is noted until then.
        """
        # A captured call is followed by steps that no Python of it sees.
        if self._may_be_noted or (self.value.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.settle()
        return self.value.clone()

    @torch.no_grad()
    def note(self, overflow: Tensor) -> None:
        """Note whether a step overflowed, != 0 if so; taken into account when the next call of the model begins.

        Several are taken for one, as those of several optimizers in one step of the loop.
        """
        self._overflow.logical_or_(overflow.detach().to(self.value.device).reshape(()) != 0)
        self._noted.fill_(True)
        self._may_be_noted = True

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

    def _settled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return scale, good steps and overflows left with what was noted taken into account, if anything was."""
        before = self.value, self._good_steps, self._overflows_left
        after = self._after(self._overflow)
        scale, good_steps, left = (torch.where(self._noted, b, a) for a, b in zip(before, after, strict=True))
        return scale, good_steps, left

    @torch.no_grad()
    def settle(self) -> None:
        """Take the steps into account that were noted."""
        self._become(self._settled())
        self._forget()

    def _forget(self) -> None:
        self._noted.fill_(False)
        self._overflow.fill_(False)
        self._may_be_noted = False

    def state_dict(self) -> dict[str, float]:
        """Return what it has learnt, as numbers; this waits for the device, and changes nothing."""
        scale, good_steps, left = self._settled()
        return {"scale": float(scale), "good_steps": int(good_steps), "overflows_left": int(left)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            InvalidArgument: if it is something else; nothing has been changed then.
        """
        try:
            scale, good, left = float(state["scale"]), int(state["good_steps"]), int(state["overflows_left"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(f"a loss scale's state has three numbers. Found: {state!r} ({error}).") from None
        if not 0 < scale < float("inf") or good < 0:
            raise InvalidArgument(f"a loss scale must be finite and > 0, and its counts >= 0. Found: {state!r}.")
        self.value.fill_(scale)
        self._good_steps.fill_(good)
        self._overflows_left.fill_(left)
        self._forget()


# -- steps that a loss scale skips -------------------------------------------------------------------------------------


class Scaled(Protocol):
    """A model whose gradients come through a loss scale."""

    scale: DynamicLossScale | None

    @property
    def trained(self) -> set[int]:
        """The ids of its parameters."""


_models: weakref.WeakSet[Any] = weakref.WeakSet()
_hidden: weakref.WeakKeyDictionary[Optimizer, list[tuple[Tensor, Tensor]]] = weakref.WeakKeyDictionary()
_flags: weakref.WeakKeyDictionary[Optimizer, Tensor] = weakref.WeakKeyDictionary()


def skip_overflowed_steps(model: Scaled) -> None:
    """Skip steps on parameters of a model that overflow, as long as the model is there."""
    _hook_in()
    _models.add(model)


@functools.cache
def _hook_in() -> None:
    UPDATES.add(_before_step, _after_step)


@torch._disable_dynamo  # type: ignore[attr-defined]  # of a compiled step too
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _models:
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    ids = {id(p) for p in params}
    scales = {id(model.scale): model.scale for model in list(_models) if not ids.isdisjoint(model.trained)}
    if not scales:
        return
    _check(optimizer, args, kwargs)
    overflow = _overflow([p.grad.detach() for p in params if p.grad is not None])
    if overflow is None:
        return
    for scale in scales.values():
        scale.note(overflow)
    if getattr(optimizer, "_step_supports_amp_scaling", False) and _begins_at_zero(optimizer):
        _flags[optimizer] = optimizer.found_inf = overflow  # type: ignore[attr-defined]
    elif bool(overflow):
        _hidden[optimizer] = [(p, p.grad) for p in params if p.grad is not None]
        for p, _ in _hidden[optimizer]:
            p.grad = None


@torch._disable_dynamo  # type: ignore[attr-defined]
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _flags.pop(optimizer, None) is not None:
        del optimizer.found_inf  # type: ignore[attr-defined]
    for p, grad in _hidden.pop(optimizer, ()):
        p.grad = grad


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Let a step that has failed be forgotten, and raise InvalidArgument if this one can't be skipped."""
    _hidden.pop(optimizer, None)
    if _flags.pop(optimizer, None) is not None:
        vars(optimizer).pop("found_inf", None)
    if hasattr(optimizer, "found_inf"):
        for name in ("found_inf", "grad_scale"):  # else a step without the scaler would find them
            vars(optimizer).pop(name, None)
        raise InvalidArgument(
            "one loss scale is enough. Found: torch.amp.GradScaler beside that of decorate; pass loss_scale=None."
        )
    if any(each is not None for each in (*args[1:2], kwargs.get("closure"))):
        raise InvalidArgument(
            "an optimizer's step takes no closure where a loss scale may skip it. Found: one. bfloat16 needs no scale; "
            "or compute loss and gradients before step()."
        )


def _overflow(grads: list[Tensor]) -> Tensor | None:
    """Return 1.0 if a gradient is not finite, else 0.0, on the device; None if there is no gradient."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        values = grad._values() if grad.is_sparse else grad
        if values.numel():
            by_kind.setdefault((values.device, values.dtype), []).append(values)
    # The largest absolute value of each is read once; a sum of squares would overflow where they don't.
    finite = [torch.stack(torch._foreach_norm(own, torch.inf)).isfinite().all() for own in by_kind.values()]
    if not finite:
        return None
    return torch.stack([each.to(finite[0].device) for each in finite]).all().logical_not().float()


def _begins_at_zero(optimizer: Optimizer) -> bool:
    """Return whether a first step may be skipped: torch's fused SGD makes momentum in it, and leaves it unwritten.

    Momentum of zero is the same as none, unless gradients are damped.
    """
    if type(optimizer).step is not SGD.step:
        return True
    for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
        for p in group["params"] if group["momentum"] else ():
            if p.grad is not None and optimizer.state[p].get("momentum_buffer") is None:
                if group["dampening"]:
                    return False
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return True
