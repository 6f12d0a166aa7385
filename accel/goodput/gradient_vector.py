"""All gradients of a model as one float32 vector, in the coordinates in which the optimizer steps.

    plain (SGD)                       g
    preconditioned (Adam, LAMB)       P g,   P = 1 / (max(√v̂, r / 10) + ε),   v̂ = v / (1 - β₂ᵗ)

One vector has one norm: the arithmetic has no loop over parameters. With Adam it is P g that moves the weights, so the
noise that matters is φ_P = tr(P Σ P) / ‖P μ‖² (Pollux, OSDI 2021, equation 5). P is that of the steps before, hence
independent of this step's samples.

r is the root mean square of √v̂ over a weight's tensor. Adam's own steps are bounded, since the gradient of a step is
in its v̂ already; in that of the steps before, the row of a letter that comes for the first time has 0. Without the
bound a model of characters had φ_P = 626,000 after 100 steps, all of it from 1 % of the weights, in place of 120; from
step 400 on the bound changes it by less than 4 %. A tensor that has had no gradient is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from accel.goodput.noise_refusal import Unmeasurable

_LEAST_ROOT = 0.1
"""√v̂ at least, of its root mean square over the tensor."""


def flattened(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
    """Return gradients as one float32 vector; 0 where there is none.

    Args:
        gradients: of the parameters, in their order.
        parameters: at least one.

    Raises:
        Unmeasurable: if one is sparse, spread over processes, or on another device.
    """
    if any(g is not None and g.layout != torch.strided for g in gradients):
        raise Unmeasurable("a gradient is sparse; make it dense, such as by nn.Embedding(sparse=False)")
    dense = [
        torch.zeros_like(p, dtype=torch.float32) if g is None else g for g, p in zip(gradients, parameters, strict=True)
    ]
    if any(each.is_complex() for each in dense):
        dense = [torch.view_as_real(each) if each.is_complex() else each for each in dense]
    return _joined(dense)


def _joined(tensors: list[Tensor]) -> Tensor:
    # torch's own flattening: one call for all parameters, where a reshape of each takes 1 µs.
    singles = [each if each.dtype == torch.float32 else each.float() for each in tensors]
    return cast(Tensor, torch._utils._flatten_dense_tensors(singles))  # type: ignore[no-untyped-call]


def denominators(parameters: Sequence[Tensor], optimizers: Sequence[Optimizer]) -> Tensor | None:
    """Return max(√v̂, r / 10) + ε as one vector, or None where an optimizer has no v̂: the plain noise scale.

    Args:
        parameters: those of the gradients, in their order.
        optimizers: that update them. With one of another kind than Adam among them, gradients stay plain: two kinds of
            coordinates have no norm in common.

    Raises:
        Unmeasurable: if no Adam has taken a step yet.
    """
    rows = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    if not rows or not all(_is_adam(optimizer, group) for optimizer, group in rows):
        return None
    owner = {id(p): (optimizer, group) for optimizer, group in rows for p in group["params"]}
    squares: list[Tensor] = []
    corrections: list[float] = []
    epsilons: list[float] = []
    for p in parameters:
        optimizer, group = owner.get(id(p), rows[0])
        state = optimizer.state.get(p, {})
        # One that has had no gradient, or that nobody updates, has no square, and is left out as those of 0 are.
        squares.append(_square(p, state) if "exp_avg_sq" in state else torch.zeros_like(p, dtype=torch.float32))
        corrections.append(_correction(state, group))
        epsilons.append(float(group["eps"]))
    if not any("exp_avg_sq" in owner[id(p)][0].state.get(p, {}) for p in parameters if id(p) in owner):
        raise Unmeasurable("the optimizer has no averages of squared gradients yet")
    return _joined(_denominators(squares, corrections, epsilons))


def _square(p: Tensor, state: dict[str, Any]) -> Tensor:
    square: Tensor = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    if square.is_complex():
        raise Unmeasurable("the optimizer's squares are complex")
    if square.shape != p.shape:
        raise Unmeasurable(f"the optimizer keeps squares of shape {tuple(square.shape)} for {tuple(p.shape)} weights")
    return square


@torch.no_grad()
def _denominators(squares: list[Tensor], corrections: list[float], epsilons: list[float]) -> list[Tensor]:
    singles = [square.float() for square in squares]
    roots = torch._foreach_sqrt(torch._foreach_div(singles, corrections))
    for root, length in zip(roots, torch._foreach_norm(roots), strict=True):
        least = length * (_LEAST_ROOT / math.sqrt(max(root.numel(), 1)))
        root.clamp_(min=torch.where(length > 0, least, math.inf))
    return list(torch._foreach_add(roots, epsilons))


def _is_adam(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Tell Adam, AdamW, NAdam, RAdam and LAMB from others: by their settings, since a new one has no state yet."""
    kept = next((state for state in optimizer.state.values() if state), None)
    betas = group.get("betas")
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    # Lion has betas and no eps, Adamax keeps exp_inf.
    return pair and "eps" in group and (kept is None or "exp_avg_sq" in kept)


def _correction(state: dict[str, Any], group: dict[str, Any]) -> float:
    step = state.get("step", group.get("step"))  # apex counts in the group
    if step is None or not group.get("bias_correction", True):
        return 1.0
    beta2, steps = float(group["betas"][1]), max(float(step), 1.0)
    return max(1.0 - float(beta2**steps), 1e-12)
