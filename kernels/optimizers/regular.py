"""Tensors that lie in memory as one run of elements, in the same order: what updates walk through."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor

from accel.kernels.optimizers.rules import Batch, work_dtype
from accel.profiler.errors import InvalidArgument, InvalidState

Copies = list[tuple[Tensor, Tensor]]
"""Destinations and sources: what is written back after the update."""
Sizes = tuple[list[torch.Size], torch.dtype]
_DTYPE = attrgetter("dtype")


def regular(batch: Batch, *, is_known: bool = False) -> tuple[Batch, Copies]:
    """Return a batch whose tensors can be updated element by element, and what to copy back afterwards.

    A parameter with gaps, and a gradient in another order than its parameter, is replaced by a copy. States and master
    weights that have another order or dtype than is due, since their parameter has got another, are brought to it.

    Args:
        batch: of parameters.
        is_known: the step before had parameters of the same `sizes`; default False.

    Raises:
        InvalidArgument: if a gradient or a state is of another shape than its parameter.
        InvalidState: if states are to be brought to another order within the capture of a CUDA graph.
    """
    # A contiguous tensor is quickly known; strides of all would take longer than a small update.
    is_plain = all(all(map(Tensor.is_contiguous, column)) for column in batch.columns)
    return (batch, []) if is_plain and (is_known or _is_alike(batch)) else _in_one_run(batch)


def sizes(batch: Batch) -> Sizes:
    """Return the sizes of a batch's parameters, and the dtype of the first."""
    return list(map(Tensor.size, batch.params)), batch.params[0].dtype


def _is_alike(batch: Batch) -> bool:
    """Return whether all is of its parameter's shape, and what is kept of one dtype that is due."""
    params, *others = batch.columns
    shapes = list(map(Tensor.size, params))
    due = {work_dtype(dtype) for dtype in set(map(_DTYPE, params))}
    kept = set(map(_DTYPE, chain.from_iterable(others[1:])))
    return len(due) == 1 and kept <= due and all(list(map(Tensor.size, column)) == shapes for column in others)


def _in_one_run(batch: Batch) -> tuple[Batch, Copies]:
    """Return a batch with copies of the parameters that have gaps, and of the gradients in another order."""
    params, grads, (_, _, *kept) = list(batch.params), list(batch.grads), batch.columns
    back: Copies = []
    for i, param in enumerate(params):
        for tensor in (grads[i], *(column[i] for column in kept)):
            if tensor.shape != param.shape:
                raise InvalidArgument(
                    f"accel.optim: a gradient and a state must have their parameter's shape, {list(param.shape)}. "
                    f"Found: {list(tensor.shape)}. Make a new optimizer for weights of another shape."
                )
        if not is_dense(param):
            # empty_like keeps the order of a dense tensor, and makes others contiguous.
            params[i] = torch.empty_like(param).copy_(param)
            back.append((param, params[i]))
        grads[i] = _in_order(grads[i], params[i], grads[i].dtype)
        for column in kept:
            brought = column[i] if column[i] is param else _in_order(column[i], params[i], work_dtype(param.dtype))
            if brought is not column[i]:
                if param.is_cuda and torch.cuda.is_current_stream_capturing():
                    raise InvalidState(
                        "accel.optim: a captured step needs states that lie as their parameters do. Found: others. Run "
                        "one step before the capture."
                    )
                column[i].data = brought
    return replace(batch, params=params, grads=grads), back


def _in_order(tensor: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor if it lies as `like` does, which has no gaps, and is of a dtype, or else a copy that does."""
    if tensor.stride() == like.stride() and tensor.dtype == dtype:
        return tensor
    return torch.empty_like(like, dtype=dtype).copy_(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor fills its memory without gaps, in any order of dimensions."""
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def copy_back(copies: Copies) -> None:
    """Write the updated copies to where they are from."""
    if copies:
        destinations, sources = zip(*copies, strict=True)
        torch._foreach_copy_(list(destinations), list(sources))
