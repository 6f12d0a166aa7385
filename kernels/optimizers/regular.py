"""Tensors that lie in memory as one run of elements, in the same order: what updates walk through."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from accel.kernels.optimizers.rules import Batch

Copies = list[tuple[Tensor, Tensor]]
"""Destinations and sources: what is written back after the update."""


def regular(batch: Batch) -> tuple[Batch, Copies]:
    """Return a batch whose tensors can be updated element by element, and what to copy back afterwards.

    A parameter with gaps, and a gradient or a state in another order than its parameter, is replaced by a copy.
    """
    columns = [batch.params, batch.grads, *batch.states]
    # A contiguous tensor is quickly known; strides of all would take longer than a small update.
    for column in columns:
        if not all(map(torch.Tensor.is_contiguous, column)):
            return _in_one_run(batch, columns)
    return batch, []


def _in_one_run(batch: Batch, columns: list[list[Tensor]]) -> tuple[Batch, Copies]:
    """Return a batch with copies of the tensors that are in another order, or have gaps."""
    params, grads, states = list(batch.params), list(batch.grads), [list(column) for column in batch.states]
    masters = list(batch.masters)
    back: Copies = []
    for i in range(len(params)):
        if all(column[i].is_contiguous() for column in columns):
            continue
        params[i] = _in_order(params[i], params[i], back)
        grads[i] = _in_order(grads[i], params[i], [])
        for column in states:
            column[i] = _in_order(column[i], params[i], back)
        if masters and (master := masters[i]) is not None:
            masters[i] = _in_order(master, params[i], back)
    return replace(batch, params=params, grads=grads, states=states, masters=masters), back


def _in_order(tensor: Tensor, like: Tensor, back: Copies) -> Tensor:
    """Return the tensor if it lies as `like` does, without gaps, or else a copy that does."""
    if tensor.stride() == like.stride() and is_dense(tensor):
        return tensor
    # empty_like keeps the order of a dense tensor, and makes others contiguous.
    copy = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
    back.append((tensor, copy))
    return copy


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor fills its memory without gaps, in any order of dimensions."""
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def copy_back(copies: Copies) -> None:
    """Write the updated copies to where they are from."""
    if copies:
        destinations, sources = zip(*copies, strict=True)
        torch._foreach_copy_(list(destinations), list(sources))
