"""Casts between a loop in float32 and a model in 16 bits, with the loss scale where gradients cross that border.

    into the model    inputs, weights    x₁₆ = x         ∂x = ∂x₁₆ / scale
    out of it         outputs            y = y₁₆         ∂y₁₆ = ∂y · scale

Within the model every gradient is scaled, outside none is. That holds for gradients of gradients too: what flows back
into the model through an input's gradient, as a gradient penalty does, is scaled by (1 / scale) · scale = 1.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_GROUP = 2**22
"""Elements of the weights that one node of the graph casts: small beside a bucket of DistributedDataParallel."""
_AT_ONCE = 2**62
"""Sequence number of the casts of weights. Autograd runs the node that was made last first. These are made before all
others, so their gradients would wait, in 16 bits, for the end of the pass, and DistributedDataParallel with them."""


def cast_weights(weights: Sequence[Tensor], dtypes: Sequence[torch.dtype], scale: Tensor | None) -> list[Tensor]:
    """Return weights in other dtypes, all at once; gradients come back in their own dtype and unscaled.

    Args:
        dtypes: of what is returned, for each.
        scale: of the gradients within the model, one element; None for none.
    """
    cast: list[Tensor] = list(weights)
    for group in _groups(weights):
        own = _applied(_Weights, [dtypes[i] for i in group], scale, *[weights[i] for i in group])
        for i, tensor in zip(group, own, strict=True):
            cast[i] = tensor
        if (node := own[0].grad_fn or own[-1].grad_fn) is not None:
            node._set_sequence_nr(_AT_ONCE)
    return cast


def _groups(weights: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield which weights one node casts: neighbours on one device that are both trained, or both not.

    A weight with hooks on its gradient has a node of its own: another node would call them with None where the weight
    was not used.
    """
    group: list[int] = []
    size, before = 0, None
    for i, weight in enumerate(weights):
        kind = (i,) if weight._backward_hooks else (weight.device, weight.requires_grad)
        if group and (kind != before or size + weight.numel() > _GROUP):
            yield group
            group, size = [], 0
        group.append(i)
        size, before = size + weight.numel(), kind
    if group:
        yield group


def enter(x: Tensor, dtype: torch.dtype | None, scale: Tensor | None) -> Tensor:
    """Return an input of the model in a dtype, None for its own; gradients that leave by it are unscaled."""
    if scale is None or not x.requires_grad:
        return x if dtype is None else x.to(dtype)
    entered: Tensor = _applied(_Enter, x, scale, dtype or x.dtype)
    return entered


def leave(y: Tensor, scale: Tensor | None) -> Tensor:
    """Return an output of the model in float32, unless it is wider; gradients that come by it are scaled."""
    dtype = torch.float32 if y.dtype in (torch.float16, torch.bfloat16) else y.dtype
    if scale is None or not y.requires_grad:
        return y.to(dtype)
    left: Tensor = _applied(_Leave, y, scale, dtype)
    return left


def _applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtypes: Sequence[torch.dtype], scale: Tensor | None, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtypes = [weight.dtype for weight in weights]
        ctx.inverse = None if scale is None else scale.to(weights[0].device).reciprocal()
        return tuple(_cast_all(weights, dtypes))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        there = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
        own: list[Tensor | None] = [None] * len(grads)
        if torch.is_grad_enabled() or any(grad.layout != torch.strided for _, grad in there):
            for i, grad in there:
                own[i] = _out_of_the_model(grad, ctx.inverse, ctx.dtypes[i])
        else:
            wide = _cast_all([grad for _, grad in there], [ctx.dtypes[i] for i, _ in there], copy=True)
            if ctx.inverse is not None and wide:
                _unscale(wide, ctx.inverse)
            for (i, _), grad in zip(there, wide, strict=True):
                own[i] = grad
        return None, None, *own


def _cast_all(tensors: Sequence[Tensor], dtypes: Iterable[torch.dtype], copy: bool = False) -> list[Tensor]:
    """Return tensors in other dtypes, by one kernel for many; those that are in theirs are not copied unless asked."""
    cast = [
        tensor.detach() if tensor.dtype == dtype and not copy else torch.empty_like(tensor, dtype=dtype)
        for tensor, dtype in zip(tensors, dtypes, strict=True)
    ]
    pairs = [(own, tensor) for own, tensor in zip(cast, tensors, strict=True) if copy or own.dtype != tensor.dtype]
    if pairs:
        torch._foreach_copy_([own for own, _ in pairs], [tensor for _, tensor in pairs])
    return cast


def _unscale(grads: list[Tensor], inverse: Tensor) -> None:
    """Divide gradients by the scale in place; where one overflows, NaN says so even if the loop clips infinities."""
    if {grad.dtype for grad in grads} != {torch.float32}:
        torch._foreach_mul_(grads, inverse)
        return
    overflow = torch.zeros_like(inverse)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, overflow, inverse)
    smallest = min((grad for grad in grads if grad.numel()), key=Tensor.numel, default=None)
    if smallest is not None:
        smallest.add_(torch.where(overflow != 0, torch.nan, 0.0))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.inverse, ctx.dtype = scale.to(x.device).reciprocal(), x.dtype
        return x.to(dtype, copy=True)  # not a view, which the model could not write to

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _out_of_the_model(grads[0], ctx.inverse, ctx.dtype), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.scale, ctx.dtype = scale.to(y.device), y.dtype
        return y.to(dtype, copy=True)  # not a view, which the loop could not write to

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _into_the_model(grads[0], ctx.scale, ctx.dtype), None, None


def _out_of_the_model(grad: Tensor, inverse: Tensor | None, dtype: torch.dtype) -> Tensor:
    if inverse is None:
        return grad.to(dtype)
    out: Tensor = (
        _applied(_Crossing, grad, inverse, dtype, True) if torch.is_grad_enabled() else grad.to(dtype) * inverse
    )
    return out


def _into_the_model(grad: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if torch.is_grad_enabled():
        into: Tensor = _applied(_Crossing, grad, scale, dtype, False)
        return into
    if grad.dtype == dtype or type(grad) is not Tensor:
        return (grad * scale).to(dtype)
    # In one pass: a language model's logits take gigabytes, and the product alone would be another pass over them.
    return torch.mul(grad, scale, out=torch.empty_like(grad, dtype=dtype))


class _Crossing(torch.autograd.Function):
    """A gradient that crosses the border, multiplied; what comes back crosses it the other way, at the same scale."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, factor: Tensor, dtype: torch.dtype, goes_in: bool) -> Tensor:
        ctx.dtype, ctx.goes_in = grad.dtype, goes_in  # `goes_in`: what comes back gets into the model
        return (grad * factor).to(dtype) if grad.dtype.itemsize > dtype.itemsize else grad.to(dtype) * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0].to(ctx.dtype), None, None, None
