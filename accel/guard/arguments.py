"""The arguments of a call: copied, so that it can be made again, and what it has left in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accel.dataio.batches import leaves, map_tensors
from accel.guard.bits import same_bits


def copied(value: Any) -> Any:
    """Return arguments with copies of their tensors, in lists and dicts of their own: the call may write to both.

    Args:
        value: arguments of a call, or a part of them.
    """
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    if type(value) is dict:
        return {key: copied(entry) for key, entry in value.items()}
    return map_tensors(copied, value)


def entries(arguments: Any, given: list[Tensor]) -> tuple[int, list[Tensor]]:
    """Return how many entries arguments have after a call, and which tensors it has put there.

    Args:
        arguments: of the call.
        given: the tensors that were there before it.
    """
    now, known = list(leaves(arguments)), set(map(id, given))
    return len(now), [each.detach() for each in now if isinstance(each, Tensor) and id(each) not in known]


def written(old: list[Tensor], new: list[Tensor]) -> list[Tensor | None]:
    """Return what a call has left in the tensors that it was given, None where it has written nothing.

    Args:
        old: what was in them.
        new: these tensors.
    """
    return [None if _is_as(was, now) else now.detach() for was, now in zip(old, new, strict=True)]


def _is_as(old: Tensor, new: Tensor) -> bool:
    if new.layout != torch.strided or new.is_nested:
        return True  # not compared
    return old.shape == new.shape and old.dtype == new.dtype and (torch.equal(old, new) or same_bits(old, new))
