"""Muon's update: momentum whose singular values are drawn towards 1, all weights of one shape at once.

    b ← μ b + (1 - μ) g        u = b        (Nesterov: u = (1 - μ) g + μ b)
    x = u / ‖u‖                k times:  a = x xᵀ,  x ← α x + (β a + γ a²) x
    w -= η λ w                 w -= η s x

Products are rounded to bfloat16, as torch does: that moves the small singular values, so that the update of a gradient
of low rank differs by some 0.4 of its length from the one in float32. Sums in another order move it by 0.01.

Tall matrices are turned first, so that x xᵀ is the smaller product; s follows from the shape (`rate_factor`). What
torch multiplies weight by weight is here one batched product for all weights of one shape, tall and wide together.

Source: https://kellerjordan.github.io/posts/muon/, https://arxiv.org/abs/2502.16982.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MOST = 2**26
"""Elements that are multiplied at once: three times as many are held meanwhile."""


def rate_factor(adjust_lr_fn: str | None, shape: Sequence[int]) -> float:
    """Return what the learning rate of a weight is multiplied by."""
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns)) if columns else 1.0


def orthogonalized(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return matrices with their singular values drawn towards 1, by Newton-Schulz.

    Args:
        x: [N, R, C], R <= C; overwritten.
        coefficients: α, β, γ.
        steps: of the iteration.
        eps: least norm that is divided by.
    """
    a, b, c = coefficients
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps))
    # A CPU without bfloat16 takes 30 times as long for its products: they stay in float32, and are rounded to it.
    emulates = x.dtype == torch.bfloat16 and x.device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported()
    x = x.float() if emulates else x

    def rounded(product: Tensor) -> Tensor:
        return product.copy_(product.bfloat16()) if emulates else product

    for _ in range(steps):
        gram = rounded(x @ x.mT)
        x = rounded(torch.baddbmm(x, rounded(torch.baddbmm(gram, gram, gram, beta=b, alpha=c)), x, beta=a))
    return x


def muon_update(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    *,
    lr: float | Tensor,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    ns_coefficients: tuple[float, float, float],
    ns_steps: int,
    eps: float,
    adjust_lr_fn: str | None,
    ns_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Update matrices and their momentum, in place.

    Args:
        params: matrices.
        grads: one for each.
        buffers: momentum of each, in the dtype of its gradient.
        lr: η; a tensor on the parameters' device is not waited for.
        weight_decay, momentum, nesterov, ns_coefficients, ns_steps, eps, adjust_lr_fn: those of `torch.optim.Muon`.
        ns_dtype: to which all products of the iteration are rounded, default bfloat16, as in torch.
    """
    if isinstance(lr, Tensor):  # in double precision, as a number is
        lr = lr.double().reshape(()) if lr.is_cuda else float(lr)
    alike: dict[Any, list[int]] = {}
    for i, p in enumerate(params):
        alike.setdefault((*sorted(p.shape), p.device, p.dtype, grads[i].dtype), []).append(i)
    for numbers in alike.values():
        numbers.sort(key=lambda i: _is_tall(params[i]))
        size = max(1, MOST // max(1, params[numbers[0]].numel()))
        for first in range(0, len(numbers), size):
            own, gradients, kept = (
                [column[i] for i in numbers[first : first + size]] for column in (params, grads, buffers)
            )
            torch._foreach_lerp_(kept, gradients, 1 - momentum)
            updates = torch._foreach_lerp(gradients, kept, momentum) if nesterov else kept
            x = _stacked(list(updates), ns_dtype)
            x = orthogonalized(x, ns_coefficients, ns_steps, eps)
            _decay(own, 1 - lr * weight_decay)
            for part, is_tall in _parts(own):
                rate = lr * rate_factor(adjust_lr_fn, own[part][0].shape)
                taken = x[part].mT if is_tall else x[part]
                taken = taken.to(own[0].dtype).contiguous()
                if isinstance(rate, Tensor):
                    taken, rate = taken * rate, 1.0
                torch._foreach_add_(own[part], list(taken.unbind()), alpha=-rate)


def _decay(params: list[Tensor], factor: float | Tensor) -> None:
    if params[0].is_cuda:
        torch._foreach_mul_(params, factor)
        return
    for p in params:  # on a CPU the other rounds the factor to bfloat16
        p.mul_(factor)


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[0] > matrix.shape[1]


def _parts(matrices: list[Tensor]) -> list[tuple[slice, bool]]:
    """Return where the wide ones stand, and the tall ones, which come after them, if there are any."""
    first = sum(not _is_tall(each) for each in matrices)
    parts = [(slice(0, first), False), (slice(first, None), True)]
    return [(part, is_tall) for part, is_tall in parts if matrices[part]]


def _stacked(updates: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return a copy of them as [N, R, C], R <= C, in few launches."""
    stacks = [(torch.stack(updates[part]), is_tall) for part, is_tall in _parts(updates)]
    return torch.cat([(each.mT if is_tall else each).to(dtype) for each, is_tall in stacks])
