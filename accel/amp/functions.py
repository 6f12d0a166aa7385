"""Functions of the user's own within a model in mixed precision: which dtype each computes in.

Within a call of a decorated model a half function gets its floating-point tensors in the model's 16-bit dtype, a float
function in float32, a promote function in the widest of them. Elsewhere all are as they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from accel.amp.border import Call, current, mapped
from accel.errors import InvalidArgument

_F = TypeVar("_F", bound=Callable[..., Any])
_Target = Callable[[Call, Any], torch.dtype]
_Kind = tuple[bool | torch.dtype, ...]
"""Of a call: whether autocast is on, and the dtypes of the tensors that are passed."""


def half_function(function: _F) -> _F:
    """Return a function that computes in 16 bits within a decorated model.

    Args:
        function: takes tensors, in structures too.

    Example:
        >>> @half_function
        ... def attend(q, k):
        ...     return q @ k.mT
    """
    return _cast_first(function, lambda call, arguments: call.dtype)


def float_function(function: _F) -> _F:
    """Return a function that computes in float32 within a decorated model.

    Args:
        function: takes tensors, in structures too.

    Example:
        >>> @float_function
        ... def entropy(logits):
        ...     return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    """
    return _cast_first(function, lambda call, arguments: torch.float32)


def promote_function(function: _F) -> _F:
    """Return a function that computes in the widest of its arguments' dtypes within a decorated model.

    Args:
        function: takes tensors, in structures too.

    Example:
        >>> @promote_function
        ... def mixed(x, y):
        ...     return torch.addcmul(x, x, y)
    """
    return _cast_first(function, lambda call, arguments: _widest(arguments))


def register_function(owner: Any, name: str, kind: Callable[[Any], Any]) -> None:
    """Make a function of a module or class one of the three kinds, for all who look it up there.

    Args:
        owner: the module or class.
        name: of the function.
        kind: `half_function`, `float_function` or `promote_function`; the last one registered holds.

    Raises:
        InvalidArgument: if there is no such function.

    Example:
        >>> register_function(torch.nn.functional, "normalize", float_function)
    """
    function = getattr(owner, name, None)
    if not callable(function):
        place = getattr(owner, "__name__", owner)
        raise InvalidArgument(f"{place!r} must have a function {name!r}. Found: {function!r}.")
    setattr(owner, name, kind(getattr(function, "_accel_original", function)))


def _cast_first(function: _F, target: _Target) -> _F:
    # Checkpointing runs it again within the backward pass, where the model's call that it belongs to has ended.
    latest: dict[_Kind, Call] = {}

    @functools.wraps(function)
    def casting(*args: Any, **kwargs: Any) -> Any:
        call = current()
        if not torch.compiler.is_compiling():
            kind = _kind((args, kwargs))
            if call is not None:
                latest[kind] = call._replace(owner=None)  # the model may be let go
            elif torch._C._current_graph_task_id() != -1:
                call = latest.get(kind)
            elif torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
                latest.pop(kind, None)  # an ordinary model's, which may checkpoint it; others run once
        if call is None:
            return function(*args, **kwargs)
        dtype = target(call, (args, kwargs))
        args, kwargs = mapped(lambda tensor: tensor.to(dtype), (args, kwargs))
        if call.autocast is None:
            return function(*args, **kwargs)
        with torch.autocast(call.autocast.device, enabled=False):
            return function(*args, **kwargs)

    casting._accel_original = function  # type: ignore[attr-defined]
    return casting  # type: ignore[return-value]


def _kind(arguments: Any) -> _Kind:
    return torch._C._is_any_autocast_enabled(), *(tensor.dtype for tensor in _floating(arguments))


def _widest(arguments: Any) -> torch.dtype:
    dtypes = [tensor.dtype for tensor in _floating(arguments)]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32


def _floating(arguments: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
