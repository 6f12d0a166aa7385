"""Linear operators on rows in pairs, each of which is the other's gradient.

torch.compile sees an opaque operator of each. Eager calls take an autograd function: half the overhead of an operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accel.kernels.support import applied


class RowsOp:
    """A linear operator: of rows, an index that says which, and at most one number.

    Args:
        name: of the operator for torch.compile.
        run: computes it.
        fake: the same without values.
        turned: returns the numbers that its gradient takes, from the rows' shape.

    Attributes:
        run: computes it, without a gradient.
        opaque: the operator for torch.compile.
    """

    def __init__(
        self,
        name: str,
        run: Callable[..., Tensor],
        fake: Callable[..., Tensor],
        turned: Callable[[torch.Size], tuple[Any, ...]],
    ) -> None:
        self.run, self.turned = run, turned
        self.opaque = torch.library.custom_op(name, run, mutates_args=())
        self.opaque.register_fake(fake)
        self.gradient: RowsOp = self

    def __call__(self, rows: Tensor, index: Tensor, *number: float) -> Tensor:
        """Compute it, to be differentiated in the rows, twice too."""
        result: Tensor = applied(_Linear)(self, rows, index, *number)
        return result

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the gradient takes."""
        rows, index, *number = inputs
        ctx.save_for_backward(index)
        ctx.turned, ctx.none = self.turned(rows.shape), (None,) * len(number)


def pair(one: RowsOp, other: RowsOp) -> None:
    """Make each operator the other's gradient."""
    for op, gradient in ((one, other), (other, one)):
        op.gradient = gradient
        op.opaque.register_autograd(_backward_of(gradient), setup_context=op.save)


def _backward_of(gradient: RowsOp) -> Callable[[Any, Tensor], tuple[Any, ...]]:
    return lambda ctx, grad: (gradient.opaque(grad, *ctx.saved_tensors, *ctx.turned), None, *ctx.none)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: RowsOp, rows: Tensor, index: Tensor, *number: float) -> Tensor:
        op.save(ctx, (rows, index, *number), rows)
        ctx.save_for_forward(index)
        ctx.op = op
        # A number of floating point is added to some rows: that is no part of a tangent.
        ctx.number = [0.0 if isinstance(each, float) else each for each in number]
        return op.run(rows, index, *number)

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: Tensor, *rest: Any) -> Tensor:
        (index,) = ctx.saved_tensors
        result: Tensor = ctx.op.run(tangent, index, *ctx.number)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (index,) = ctx.saved_tensors
        # Where no second derivative is wanted, without another function.
        gradient = ctx.op.gradient if torch.is_grad_enabled() else ctx.op.gradient.run
        return None, gradient(grad, index, *ctx.turned), None, *ctx.none
