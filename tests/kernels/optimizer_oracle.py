"""The formulas of rules.py, a parameter at a time in float64: what kernels and the path of a CPU are held to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accel.kernels.optimizers.rules import Batch, Hypers, Kind, Scaling, UpdateOutcome, needs_norm


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


def _updated(kind: Kind, batch: Batch, row: Hypers, w: Tensor, g: Tensor, states: list[Tensor], t: float) -> Tensor:
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


def _direction(batch: Batch, row: Hypers, g: Tensor, states: list[Tensor], t: float) -> Tensor:
    if not states:
        return g
    momentum, dampening = row.beta1, row.beta2
    (buffer,) = states
    first = dampening != 0 and t == 1
    buffer.copy_(g if first else momentum * buffer + (1 - dampening) * g)
    return g + momentum * buffer if batch.nesterov else buffer


def _lars_ratio(row: Hypers, w: Tensor, g: Tensor) -> Tensor:
    adapts = bool(row.always_adapt or row.weight_decay) and bool(w.norm() > 0) and bool(g.norm() > 0)
    if not adapts:
        return torch.ones((), dtype=torch.float64)
    ratio = row.trust * w.norm() / (g.norm() + row.weight_decay * w.norm() + row.eps)
    clipped: Tensor = (ratio / row.lr).clamp(max=1.0)
    return clipped if row.trust_clip else ratio


def _adam(batch: Batch, row: Hypers, g: Tensor, states: list[Tensor], t: float) -> Tensor:
    m, v, *largest = states
    m.copy_(row.beta1 * m + (1 - row.beta1 if row.grad_averaging else 1.0) * g)
    v.copy_(row.beta2 * v + (1 - row.beta2) * g * g)
    if batch.amsgrad:
        largest[0].copy_(torch.maximum(largest[0], v))
        v = largest[0]
    correction1, correction2 = (1 - row.beta1**t, 1 - row.beta2**t) if row.bias_correction else (1.0, 1.0)
    update: Tensor = m / correction1 / ((v / correction2).sqrt() + row.eps)
    return update
