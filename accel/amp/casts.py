"""Casts of a model's weights to 16 bits, of many at once; their gradients come back in float32."""

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


def cast_weights(weights: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Return weights in other dtypes, one for each, all at once; gradients come back in their own dtype."""
    cast: list[Tensor] = list(weights)
    for group in _groups(weights):
        own: Any = _Weights.apply([dtypes[i] for i in group], *[weights[i] for i in group])  # type: ignore[no-untyped-call]
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


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtypes: Sequence[torch.dtype], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtypes = [weight.dtype for weight in weights]
        return tuple(_cast_all(weights, dtypes))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        there = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
        own: list[Tensor | None] = [None] * len(grads)
        if torch.is_grad_enabled() or any(grad.layout != torch.strided for _, grad in there):
            for i, grad in there:
                own[i] = grad.to(ctx.dtypes[i])
        else:
            wide = _cast_all([grad for _, grad in there], [ctx.dtypes[i] for i, _ in there])
            for (i, _), grad in zip(there, wide, strict=True):
                own[i] = grad
        return None, *own


def _cast_all(tensors: Sequence[Tensor], dtypes: Iterable[torch.dtype]) -> list[Tensor]:
    """Return tensors in other dtypes, by one kernel for many; those that are in theirs are not copied."""
    cast = [
        tensor.detach() if tensor.dtype == dtype else torch.empty_like(tensor, dtype=dtype)
        for tensor, dtype in zip(tensors, dtypes, strict=True)
    ]
    pairs = [(own, tensor) for own, tensor in zip(cast, tensors, strict=True) if own.dtype != tensor.dtype]
    if pairs:
        torch._foreach_copy_([own for own, _ in pairs], [tensor for _, tensor in pairs])
    return cast
