"""The moments of weights without masters: where the optimizer's update takes no others, their dtype is the weights'.

Adam's kind updates them by `lerp_`, which takes a gradient of the same dtype only. Others take both, and keep float32.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.utils import _pytree as pytree

from accel.optim import MultiTensorOptimizer

_KNOWN = frozenset({torch.float32, torch.float16, torch.bfloat16})


class MomentDtypes:
    """Casts an optimizer's state when the dtype of its parameters was changed.

    Args:
        optimizer: those of `accel.optim` keep float32 in any case.
        params: whose dtype changes.
    """

    def __init__(self, optimizer: Optimizer, params: Iterable[Tensor]) -> None:
        # Weakly: a model that is kept for evaluation must not keep the moments of its optimizer.
        self._optimizer, self._params = weakref.ref(optimizer), list(params)

    def follow(self) -> None:
        """Give the state of each parameter the dtype that this has now."""
        optimizer = self._optimizer()
        if optimizer is None or isinstance(optimizer, MultiTensorOptimizer):
            return
        adams = {p for group in optimizer.param_groups if "betas" in group for p in group["params"]}
        for p in self._params:
            if p in optimizer.state and (p in adams or p.dtype == torch.float32):
                own = optimizer.state[p]
                own.update({name: _cast(value, p.dtype) for name, value in own.items() if name != "step"})


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def cast(part: Any) -> Any:
        # A single number is a counter, or a product of numbers, whose updates take any dtype.
        is_moment = isinstance(part, Tensor) and part.dim() > 0 and part.dtype in _KNOWN
        return part.to(dtype) if is_moment else part

    return pytree.tree_map(cast, value)


def begins_momentum(optimizer: Optimizer) -> bool:
    """Return whether a step would make buffers of momentum that torch's fused SGD leaves unwritten if it is skipped."""
    return isinstance(optimizer, SGD) and any(
        optimizer.state.get(p, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group["momentum"]
        for p in group["params"]
        if p.grad is not None
    )
