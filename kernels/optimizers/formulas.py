"""The published formulas, a parameter at a time in float64: what kernels and the path of a CPU are held to.

g is the gradient over the loss scale, times c = min(1, max_norm / (‖all g‖ + 1e-6)) where a norm is given, and negative
where an objective is maximised; w the weight, η the learning rate, λ the weight decay, t the step from 1.

    SGD     g += λ w        b ← μ b + (1 - d) g, at first b = g       w -= η b          Nesterov: w -= η (g + μ b)
    Adam    g += λ w        m ← β₁ m + (1 - β₁) g                     v ← β₂ v + (1 - β₂) g²
            w -= η m̂ / (√v̂ + ε)         m̂ = m / (1 - β₁ᵗ)         v̂ = v / (1 - β₂ᵗ), or its largest yet (AMSGrad)
    AdamW   w -= η λ w, then Adam with λ = 0
    LAMB    u = m̂ / (√v̂ + ε) + λ w              w -= η (‖w‖ / ‖u‖) u
    LARS    r = τ ‖w‖ / (‖g‖ + λ ‖w‖ + ε)        b ← μ b + η r (g + λ w)            w -= b

LAMB is Algorithm 2 of the published version (ICLR 2020, arXiv v5), with bias correction and φ(x) = x. The ratio is 1
where a norm is 0, and, unless `always_adapt`, where λ = 0. Without `grad_averaging` m takes g instead of (1 - β₁) g;
coupled, g += λ w comes before the moments and u has no λ w. LARS is Algorithm 1; without `lr_in_momentum` η multiplies
b when the weight is updated, as in most code, which is not the same while η changes. `trust_clip` takes min(r / η, 1)
for r (LARC).

SGD: Sutskever et al. 2013. Adam: https://arxiv.org/abs/1412.6980. AMSGrad: https://arxiv.org/abs/1904.09237. AdamW:
https://arxiv.org/abs/1711.05101. LAMB: https://arxiv.org/abs/1904.00962. LARS: https://arxiv.org/abs/1708.03888.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accel.kernels.optimizers.rules import Batch, Kind, Numbers, Scaling, UpdateOutcome, needs_norm


def update_ref(kind: Kind, batches: Sequence[Batch], scaling: Scaling | None = None) -> UpdateOutcome:
    """Update parameters in plain torch, in place; slow, for tests.

    Args:
        kind: of optimizer.
        batches: one for each parameter group.
        scaling: of mixed precision.

    Returns:
        The norm of all gradients, and whether the step was skipped.
    """
    scaling = scaling or Scaling()
    scale = 1.0 if scaling.grad_scale is None else float(scaling.grad_scale)
    grads = [[g.double() / scale for g in batch.grads] for batch in batches]
    flat = [g.flatten() for group in grads for g in group]
    norm = torch.cat(flat).norm() if flat else torch.zeros((), dtype=torch.float64)
    skips = bool(scaling.found_inf) or (scaling.checks and not norm.isfinite())
    for batch, group in zip(batches, grads, strict=True):
        if not skips:
            _update_group(kind, batch, group, norm)
    return UpdateOutcome(norm if needs_norm(batches, scaling) else None, torch.tensor(float(skips)))


def _update_group(kind: Kind, batch: Batch, grads: list[Tensor], norm: Tensor) -> None:
    row = batch.row.numbers()
    clip = float((row.max_norm / (norm + 1e-6)).clamp(max=1.0))
    for index, g in enumerate(grads):
        master = batch.masters[index] if batch.masters else None
        weight = batch.params[index] if master is None else master
        step = batch.steps[index] if batch.steps else None
        states = [column[index] for column in batch.states]
        if step is not None:
            step += 1
        t = 0.0 if step is None else float(step)
        exact = [state.double() for state in states]
        w = _updated(kind, batch, row, weight.double(), g * clip * row.sign, exact, t)
        weight.copy_(w)
        for state, value in zip(states, exact, strict=True):
            state.copy_(value)
        if master is not None:
            batch.params[index].copy_(master)


def _updated(kind: Kind, batch: Batch, row: Numbers, w: Tensor, g: Tensor, states: list[Tensor], t: float) -> Tensor:
    """Return the new weight; the states are changed in place."""
    if kind == "sgd":
        return w - row.lr * _direction(batch, row, g + row.weight_decay * w, states, t)
    if kind == "lars":
        ratio = _lars_ratio(row, w, g)
        inside, outside = (row.lr, 1.0) if row.lr_in_momentum else (1.0, row.lr)
        return w - outside * _direction(batch, row, inside * ratio * (g + row.weight_decay * w), states, t)
    if kind == "adam":
        if row.decoupled:
            return w - row.lr * row.weight_decay * w - row.lr * _adam(batch, row, g, states, t)
        return w - row.lr * _adam(batch, row, g + row.weight_decay * w, states, t)
    if row.decoupled:
        u = _adam(batch, row, g, states, t) + row.weight_decay * w
    else:
        u = _adam(batch, row, g + row.weight_decay * w, states, t)
    adapts = bool(row.always_adapt or row.weight_decay) and bool(w.norm() > 0) and bool(u.norm() > 0)
    return w - row.lr * (w.norm() / u.norm() if adapts else 1.0) * u


def _direction(batch: Batch, row: Numbers, g: Tensor, states: list[Tensor], t: float) -> Tensor:
    if not states:
        return g
    momentum, dampening = row.beta1, row.beta2
    (buffer,) = states
    first = dampening != 0 and t == 1
    buffer.copy_(g if first else momentum * buffer + (1 - dampening) * g)
    return g + momentum * buffer if batch.nesterov else buffer


def _lars_ratio(row: Numbers, w: Tensor, g: Tensor) -> Tensor:
    adapts = bool(row.always_adapt or row.weight_decay) and bool(w.norm() > 0) and bool(g.norm() > 0)
    if not adapts:
        return torch.ones((), dtype=torch.float64)
    ratio = row.trust * w.norm() / (g.norm() + row.weight_decay * w.norm() + row.eps)
    clipped: Tensor = (ratio / row.lr).clamp(max=1.0)
    return clipped if row.trust_clip else ratio


def _adam(batch: Batch, row: Numbers, g: Tensor, states: list[Tensor], t: float) -> Tensor:
    m, v, *largest = states
    m.copy_(row.beta1 * m + (1 - row.beta1 if row.grad_averaging else 1.0) * g)
    v.copy_(row.beta2 * v + (1 - row.beta2) * g * g)
    if batch.amsgrad:
        largest[0].copy_(torch.maximum(largest[0], v))
        v = largest[0]
    correction1, correction2 = (1 - row.beta1**t, 1 - row.beta2**t) if row.bias_correction else (1.0, 1.0)
    update: Tensor = m / correction1 / ((v / correction2).sqrt() + row.eps)
    return update
