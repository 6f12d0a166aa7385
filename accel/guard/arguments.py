"""The arguments of a call: copied, so that it can be made again, and what it has left in them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import UserDict, deque
from typing import Any

import torch
from torch import Tensor, nn

from accel.dataio.batches import fields_of, leaves, map_tensors, with_entries
from accel.guard.bits import same_bits


def copied(value: Any) -> Any:
    """Return arguments with copies of their tensors, in containers of their own: the call may write to both.

    Lists, dicts, sets, deques and dataclasses keep their class, a `defaultdict` its factory. What else there is, such
    as an object of another class, is the same.

    Args:
        value: arguments of a call, or a part of them.
    """
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, tuple):
        return with_entries(value, list(map(copied, value)))
    if type(value) is dict:
        return {key: copied(entry) for key, entry in value.items()}
    if isinstance(value, list | deque | set | dict | UserDict) or _is_dataclass(value):
        with contextlib.suppress(TypeError, AttributeError):  # one that can't be copied, or written to
            return _copied(value)
    return map_tensors(copied, value)


def _copied(value: Any) -> Any:
    """Return a copy of a container that can be written to, with copies of its entries."""
    made = copy.copy(value)
    if isinstance(value, list):
        made[:] = map(copied, value)
    elif isinstance(value, deque):
        made.clear()
        made.extend(map(copied, value))
    elif isinstance(value, dict | UserDict):
        for key, entry in value.items():
            made[key] = copied(entry)
    elif not isinstance(value, set):
        for name, entry in fields_of(value).items():
            object.__setattr__(made, name, copied(entry))  # of a frozen one too
    return made


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module)


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
