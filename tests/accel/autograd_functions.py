"""Functions of the user's with a backward pass of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class OneGradient(torch.autograd.Function):
    """Multiply, and give the second factor no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class OneNode(torch.autograd.Function):
    """Return both tensors from one node, as a compiled model does; no gradient arrives at one that isn't used."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return first.clone(), second.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients
