"""Window attention's kernels with their gradient: as a function for eager calls, as an operator for torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from accel.kernels.support import applied, is_plain
from accel.kernels.window_attention.attention import CheckedCall, Spec, cost
from accel.kernels.window_attention.launchers import CallPlans, backward, forward
from accel.kernels.window_attention.regions import shift_regions


class WindowAttentionFunction(torch.autograd.Function):
    """Saves qkv and the small inputs; everything else is recomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        table: Tensor,
        head_scale: Tensor | None,
        regions: Tensor | None,
        seed: Tensor | None,
        plans: CallPlans,
    ) -> Tensor:
        """Launch, and save."""
        ctx.save_for_backward(qkv, table, head_scale, regions, seed)
        ctx.plans = plans
        return forward(qkv, table, head_scale, regions, seed, plans)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Launch."""
        if torch.is_grad_enabled():  # create_graph=True: a second derivative is refused in torch's own words
            return _launch_once(ctx, *grads)
        return _launch(ctx, *grads)


def _launch(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    qkv, table, head_scale, regions, seed = ctx.saved_tensors
    needs_scale = ctx.needs_input_grad[2]
    dqkv, dtable, dscale = backward(dout, qkv, table, head_scale, regions, seed, ctx.plans, needs_scale)
    return dqkv, dtable, dscale, None, None, None


_launch_once = once_differentiable(_launch)


def attend(qkv: Tensor, table: Tensor, head_scale: Tensor | None, regions: Tensor | None, known: CheckedCall) -> Tensor:
    """Attend within the windows of a contiguous map, differentiably."""
    spec, seed = known.spec, None
    if spec.dropout > 0:
        # torch's generator, so that manual_seed and captured graphs behave as they do with its own dropout.
        seed = torch.randint(2**62, (1,), device=qkv.device)
    table = table.contiguous()
    head_scale = None if head_scale is None else head_scale.contiguous()
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        sizes, numbers = [spec.heads, *spec.window, *spec.shift], [spec.scale, spec.mask_value, spec.dropout]
        compiled: Tensor = _attend_op(qkv, table, head_scale, regions, seed, sizes, numbers)
        return compiled
    plans = CallPlans.of(qkv, head_scale, regions, known)
    if is_plain(qkv, table, head_scale):
        return forward(qkv, table, head_scale, regions, seed, plans)
    out: Tensor = applied(WindowAttentionFunction)(qkv, table, head_scale, regions, seed, plans)
    return out


# torch.compile and dispatch modes (FLOP counters, fake tensors) see an opaque op. Other eager calls go round it: the
# dispatcher and its Python wrappers cost more host time than both launches.


@torch.library.custom_op("accel::window_attention", mutates_args=())
def _attend_op(
    qkv: Tensor,
    table: Tensor,
    head_scale: Tensor | None,
    regions: Tensor | None,
    seed: Tensor | None,
    sizes: list[int],
    numbers: list[float],
) -> Tensor:
    known = _unchecked(sizes, numbers)
    regions = _looked_up(regions, qkv, known.spec)
    return forward(qkv, table, head_scale, regions, seed, CallPlans.of(qkv, head_scale, regions, known))


@_attend_op.register_fake
def _(qkv: Tensor, *_: Any) -> Tensor:
    return qkv.new_empty((*qkv.shape[:-1], qkv.shape[-1] // 3))


@torch.library.custom_op("accel::window_attention_backward", mutates_args=())
def _backward_op(
    dout: Tensor,
    qkv: Tensor,
    table: Tensor,
    head_scale: Tensor | None,
    regions: Tensor | None,
    seed: Tensor | None,
    sizes: list[int],
    numbers: list[float],
) -> tuple[Tensor, Tensor, Tensor]:
    known = _unchecked(sizes, numbers)
    regions = _looked_up(regions, qkv, known.spec)
    plans = CallPlans.of(qkv, head_scale, regions, known)
    dqkv, dtable, dscale = backward(dout, qkv, table, head_scale, regions, seed, plans)
    return dqkv, dtable, table.new_empty(0) if dscale is None else dscale


@_backward_op.register_fake
def _(dout: Tensor, qkv: Tensor, table: Tensor, head_scale: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dscale = table.new_empty(0) if head_scale is None else torch.empty_like(head_scale)
    return torch.empty_like(qkv), torch.empty_like(table), dscale


def _looked_up(regions: Tensor | None, qkv: Tensor, spec: Spec) -> Tensor | None:
    """Return the regions of a shifted map, which compiled code leaves to the operator."""
    if regions is not None or not any(spec.shift):
        return regions
    return shift_regions((qkv.shape[1], qkv.shape[2]), spec.window, spec.shift, qkv.device)


def _unchecked(sizes: list[int], numbers: list[float]) -> CheckedCall:
    """Return a call that was checked before it was compiled; its plans are looked up each time."""
    heads, tall, wide, down, right = sizes
    scale, mask_value, dropout = numbers
    spec = Spec(
        heads=heads, window=(tall, wide), shift=(down, right), scale=scale, mask_value=mask_value, dropout=dropout
    )
    return CheckedCall(spec, False, {}, [])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.numbers = inputs[5:]


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    dqkv, dtable, dscale = _backward_op(dout, *ctx.saved_tensors, *ctx.numbers)
    return dqkv, dtable, dscale if ctx.saved_tensors[2] is not None else None, *(None,) * 4


_attend_op.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.accel.window_attention)
def _(qkv: torch.Size, *rest: Any, **unused: Any) -> int:
    return _flops(qkv, *rest[-2:])


@register_flop_formula(torch.ops.accel.window_attention_backward)
def _(dout: torch.Size, qkv: torch.Size, *rest: Any, **unused: Any) -> int:
    return _flops(qkv, *rest[-2:], backward=True)


def _flops(qkv: torch.Size, sizes: list[int], numbers: list[float], *, backward: bool = False) -> int:
    spec = _unchecked(sizes, numbers).spec
    windows = qkv[:-1].numel() // spec.tokens
    return int(cost(windows, spec, qkv[-1] // (3 * spec.heads), 1, backward=backward).flops)
