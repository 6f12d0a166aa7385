"""Steps that a loss scale skips: of any optimizer with a gradient of a scaled model that is not finite.

Gradients are looked at when the step begins, as they are then; nothing is remembered of backward passes. Optimizers
that know `found_inf`, as torch's fused ones and those of `accel.optim`, are told, and nothing waits for the device; any
other finds no gradients in a step that is skipped, at the cost of one number read.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from accel.amp.loss_scale import DynamicLossScale
from accel.errors import InvalidArgument
from accel.profiler.loop.update_hooks import UPDATES


class Scaled(Protocol):
    """A model whose gradients come through a loss scale."""

    scale: DynamicLossScale | None

    @property
    def trained(self) -> set[int]:
        """The ids of its parameters."""


_models: weakref.WeakSet[Any] = weakref.WeakSet()
_hidden: weakref.WeakKeyDictionary[Optimizer, list[tuple[Tensor, Tensor]]] = weakref.WeakKeyDictionary()
_flags: weakref.WeakKeyDictionary[Optimizer, Tensor] = weakref.WeakKeyDictionary()


def watch(model: Scaled) -> None:
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
