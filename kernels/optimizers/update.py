"""One step of an optimizer for all parameters: on a GPU by kernels, elsewhere by torch's fused operators.

On a CPU weights are updated in float32, or float64 where they are float64. Gradients are read and
left as they are: what is scaled or clipped is a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from accel.kernels.optimizers.device import Launcher
from accel.kernels.optimizers.regular import Sizes, copy_back, regular, sizes
from accel.kernels.optimizers.rules import Batch, Hypers, Kind, Scaling, UpdateOutcome, needs_norm, work_dtype
from accel.kernels.support import Cost, runs_triton


class Updater:
    """Updates the parameters of one optimizer.

    Formulas: `accel.kernels.optimizers.rules`.

    Args:
        kind: of optimizer.

    Example:
        >>> weight, momentum = torch.ones(3), torch.zeros(3)
        >>> batch = Batch(Hypers(lr=0.1, beta1=0.9), [weight], [torch.ones(3)], [[momentum]])
        >>> _ = Updater("sgd")([batch])
        >>> weight
        tensor([0.9000, 0.9000, 0.9000])
    """

    def __init__(self, kind: Kind) -> None:
        self.kind: Kind = kind
        self._launcher: Launcher | None = None
        self._known: list[Sizes] = []

    def __call__(self, batches: Sequence[Batch], scaling: Scaling | None = None) -> UpdateOutcome:
        """Update, in place.

        Args:
            batches: one for each parameter group, with the parameters that have a gradient.
            scaling: of mixed precision; None (default) for none.

        Returns:
            The norm of all gradients and whether the step was skipped, each where it was asked for. On a GPU nothing
            waits for them, and the next step overwrites them.
        """
        scaling = scaling or Scaling()
        first = next((batch.params[0] for batch in batches if batch.params), None)
        if first is None:
            return UpdateOutcome(None, None)
        if runs_triton(first):
            outcome = self._launcher_on(first).update(self.kind, batches, scaling)
        else:
            outcome = update_on_host(self.kind, batches, scaling, self._known)
        # Neither our kernels nor torch's fused ones say so: what autograd saved of a parameter is no more what it was.
        for batch in batches:
            torch.autograd.graph.increment_version(batch.params)
        return outcome

    def send(self, rows: Sequence[Hypers], param: Tensor) -> None:
        """Send the numbers of parameter groups to the device of a parameter, before a captured step or a capture."""
        if runs_triton(param):
            launcher = self._launcher_on(param)
            launcher.send(rows)
            launcher.make_room()

    def _launcher_on(self, param: Tensor) -> Launcher:
        if self._launcher is None or self._launcher.device != param.device:
            self._launcher = Launcher(param.device)
        return self._launcher


_STATES = {"sgd": 1, "lars": 1, "adam": 2, "lamb": 2}


def cost(
    kind: Kind,
    numel: int,
    dtype: torch.dtype = torch.float32,
    *,
    norm: bool = False,
    states: int | None = None,
    grad_bytes: int | None = None,
) -> Cost:
    """Return the least work of a step.

    Args:
        kind: of optimizer.
        numel: elements of all parameters.
        dtype: of parameters and gradients; 16-bit ones have float32 master weights.
        norm: whether gradients are clipped, or looked through for infinity: they are read twice.
        states: moments or buffers of a parameter; None (default) for as many as the optimizer usually has.
        grad_bytes: of an element of a gradient; None (default) for those of `dtype`.

    Returns:
        Bytes read and written, and roughly how many operations.
    """
    param = torch.empty((), dtype=dtype).element_size()
    weight = max(param, 4)
    grad = param if grad_bytes is None else grad_bytes
    state = weight * (_STATES[kind] if states is None else states)
    # Weight and states are read and written, the gradient is read; the 16-bit parameter is written.
    each = 2 * weight + 2 * state + grad + (param if param < 4 else 0)
    each += grad if norm or kind == "lars" else 0
    # LARS needs norms of the weights first; LAMB reads moments and weights once more, when it has the norms.
    each += weight if kind == "lars" else 0
    each += weight + state if kind == "lamb" else 0
    return Cost(flops=20 * numel, bytes=each * numel)


# -- on a CPU ----------------------------------------------------------------------------------------------------------


_DTYPE = attrgetter("dtype")
_ONE = torch.ones(())
"""Added to step counters: a number would be made a tensor for each of them."""
_FOREVER = torch.full((), 1e9)
"""A step at which the bias of moments is 0."""


def update_on_host(kind: Kind, batches: Sequence[Batch], scaling: Scaling, before: list[Sizes]) -> UpdateOutcome:
    """Update the parameters of all groups, in place.

    Args:
        kind: of optimizer.
        batches: one for each parameter group.
        scaling: of mixed precision.
        before: sizes that the step before found, those of this step after it.

    Returns:
        The norm where a group is clipped or nobody looked for infinity and NaN, and whether the step was skipped.
    """
    asked = scaling.checks or scaling.found_inf is not None
    skips = scaling.found_inf is not None and float(scaling.found_inf) != 0
    scale = 1.0 if scaling.grad_scale is None else float(scaling.grad_scale)
    inverse = math.inf if skips and scale == 0 else 1.0 / scale  # 0: halved too often, where all steps are skipped
    norm, known = math.inf, None
    if needs_norm(batches, scaling):
        norm = _norm([g for batch in batches for g in batch.grads]) * inverse
        known = torch.tensor(norm)
        skips = skips or (scaling.checks and not math.isfinite(norm) and not _all_finite(batches))
    if skips:
        return UpdateOutcome(known, torch.ones(()))
    outcome = UpdateOutcome(known, torch.zeros(()) if asked else None)
    parts = [part for batch in batches if batch.params for part in _by_dtype(batch)]
    own = list(map(sizes, parts))
    ready = [regular(part, is_known=own == before) for part in parts]  # all before any is updated: one may be refused
    before[:] = own
    for part, copies in ready:
        row = part.row.numbers()
        _update(kind, part, row, inverse * _clip(row.max_norm, norm))
        copy_back(copies)
    return outcome


def _clip(max_norm: float, norm: float) -> float:
    if not math.isfinite(max_norm):
        return 1.0
    coefficient = max_norm / (norm + 1e-6)
    return 1.0 if coefficient >= 1 else coefficient  # NaN stays, as torch's clip_grad_norm_ leaves it


def _norm(grads: Sequence[Tensor]) -> float:
    """Return the norm of all gradients; squares of 16-bit numbers are summed in float32."""
    squares = 0.0
    for dtype in {g.dtype for g in grads}:
        norms = torch._foreach_norm([g for g in grads if g.dtype == dtype], 2, dtype=work_dtype(dtype))
        squares += float(torch.stack(norms).double().square().sum())
    return math.sqrt(squares) if squares >= 0 else squares


def _all_finite(batches: Sequence[Batch]) -> bool:
    return all(bool(g.isfinite().all()) for batch in batches for g in batch.grads)


def _by_dtype(batch: Batch) -> Iterator[Batch]:
    """Yield the parameters of each dtype, those with master weights apart."""
    kinds: list[Any] = list(map(_DTYPE, batch.params))
    if batch.masters:
        kinds = [(dtype, m is None) for dtype, m in zip(kinds, batch.masters, strict=True)]
    distinct = dict.fromkeys(kinds)
    if len(distinct) == 1:
        yield batch
        return
    for kind in distinct:
        yield _chosen(batch, [i for i, own in enumerate(kinds) if own == kind])


def _chosen(batch: Batch, indices: Sequence[int]) -> Batch:
    return replace(
        batch,
        params=[batch.params[i] for i in indices],
        grads=[batch.grads[i] for i in indices],
        states=[[column[i] for i in indices] for column in batch.states],
        masters=[batch.masters[i] for i in indices] if batch.masters else (),
        steps=[batch.steps[i] for i in indices] if batch.steps else [],
    )


def _update(kind: Kind, batch: Batch, row: Hypers, factor: float) -> None:
    """Update parameters of one dtype."""
    dtype = batch.params[0].dtype
    work = work_dtype(dtype)
    masters = [m for m in batch.masters if m is not None] if batch.masters else []
    weights = masters or (batch.params if dtype == work else [p.to(work) for p in batch.params])
    if kind in ("lamb", "lars"):
        factor *= row.sign
    grads = _scaled(batch.grads, factor, work)
    if batch.steps:
        torch._foreach_add_(batch.steps, _ONE, alpha=1.0)
    _UPDATES[kind](batch, row, weights, grads)
    if weights is not batch.params:
        torch._foreach_copy_(batch.params, weights)


def _scaled(grads: list[Tensor], factor: float, work: torch.dtype) -> list[Tensor]:
    """Return the gradients times a factor in the dtype of the update; themselves if they are that."""
    if set(map(_DTYPE, grads)) != {work}:
        grads = [torch.empty_like(g, dtype=work).copy_(g) for g in grads]
        if factor != 1:
            torch._foreach_mul_(grads, factor)
        return grads
    return grads if factor == 1 else list(torch._foreach_mul(grads, factor))


def _adam(batch: Batch, row: Hypers, weights: list[Tensor], grads: list[Tensor]) -> None:
    first, second, *largest = batch.states
    kernel = torch._fused_adamw_ if row.decoupled else torch._fused_adam_
    kernel(
        weights,
        grads,
        first,
        second,
        largest[0] if batch.amsgrad else [],
        batch.steps,
        lr=row.lr,
        beta1=row.beta1,
        beta2=row.beta2,
        weight_decay=row.weight_decay,
        eps=row.eps,
        amsgrad=batch.amsgrad,
        maximize=row.sign < 0,
    )


def _sgd(batch: Batch, row: Hypers, weights: list[Tensor], grads: list[Tensor]) -> None:
    buffers = batch.states[0] if batch.states else []
    first = [float(s) == 1 for s in batch.steps]
    if any(first) and not all(first):
        for number in (True, False):
            own = [i for i, is_first in enumerate(first) if is_first is number]
            part = [[column[i] for i in own] for column in (weights, grads, buffers)]
            _fused_sgd(part[0], part[1], part[2], row, nesterov=batch.nesterov, first=number)
        return
    _fused_sgd(weights, grads, buffers, row, nesterov=batch.nesterov, first=any(first))


def _fused_sgd(
    weights: list[Tensor], grads: list[Tensor], buffers: list[Tensor], row: Hypers, *, nesterov: bool, first: bool
) -> None:
    torch._fused_sgd_(
        weights,
        grads,
        buffers,
        weight_decay=row.weight_decay,
        momentum=row.beta1 if buffers else 0.0,
        lr=row.lr,
        dampening=row.beta2,
        nesterov=nesterov,
        maximize=row.sign < 0,
        is_first_step=first,
    )


def _norms(tensors: list[Tensor]) -> list[float]:
    return torch.stack(torch._foreach_norm(tensors)).tolist()


def _lars(batch: Batch, row: Hypers, weights: list[Tensor], grads: list[Tensor]) -> None:
    lr, decay = row.lr, row.weight_decay
    ratios = [1.0] * len(weights)
    if row.always_adapt or decay != 0:
        norms = zip(_norms(weights), _norms(grads), strict=True)
        ratios = [_lars_ratio(row, weight, grad) for weight, grad in norms]
    inside, outside = (lr, 1.0) if row.lr_in_momentum else (1.0, lr)
    factors = [ratio * inside for ratio in ratios]
    grads = list(torch._foreach_mul(grads, factors))
    buffers = batch.states[0] if batch.states else []
    # One pass over each tensor, where foreach operators, which are loops on a CPU, would take four.
    for i, factor in enumerate(factors):
        own = row._replace(lr=outside, weight_decay=decay * factor, sign=1.0)
        first = bool(batch.steps) and float(batch.steps[i]) == 1
        _fused_sgd([weights[i]], [grads[i]], [buffers[i]] if buffers else [], own, nesterov=batch.nesterov, first=first)


def _lars_ratio(row: Hypers, weight: float, grad: float) -> float:
    if not (weight > 0 and grad > 0):
        return 1.0
    ratio = row.trust * weight / (grad + row.weight_decay * weight + row.eps)
    return (ratio / row.lr if ratio < row.lr else 1.0) if row.trust_clip else ratio


def _lamb(batch: Batch, row: Hypers, weights: list[Tensor], grads: list[Tensor]) -> None:
    first, second = batch.states
    decay = row.weight_decay
    if decay != 0 and not row.decoupled:
        grads = list(torch._foreach_add(grads, weights, alpha=decay))
    # Adam's kernel makes moments and update in one pass over memory, where operators take ten: run on weights of 0, it
    # leaves the update, negative. It averages gradients: where they are summed, the moment is scaled there and back.
    share = 1.0 if row.grad_averaging else 1 - row.beta1
    if share != 1:
        torch._foreach_mul_(first, share)
    updates = [torch.zeros_like(w) for w in weights]
    torch._fused_adam_(
        updates,
        grads,
        first,
        second,
        [],
        batch.steps if row.bias_correction else [_FOREVER.to(weights[0].device)] * len(weights),
        lr=1 / share,
        beta1=row.beta1,
        beta2=row.beta2,
        weight_decay=0.0,
        eps=row.eps,
        amsgrad=False,
        maximize=False,
    )
    if share != 1:
        torch._foreach_mul_(first, 1 / share)
    if decay != 0 and row.decoupled:
        torch._foreach_add_(updates, weights, alpha=-decay)
    rates = [row.lr] * len(weights)
    if row.always_adapt or decay != 0:
        norms = zip(_norms(weights), _norms(updates), strict=True)
        rates = [row.lr * weight / update if weight > 0 and update > 0 else row.lr for weight, update in norms]
    for weight, update, rate in zip(weights, updates, rates, strict=True):
        weight.add_(update, alpha=rate)


_UPDATES = {"sgd": _sgd, "adam": _adam, "lamb": _lamb, "lars": _lars}
