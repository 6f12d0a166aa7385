"""The guard of optimizers: does a candidate path of the optimizer's step make the same update?

A shadow optimizer steps copies of some parameters, gradients and states, once along the plain path and once along the
candidate's. The real parameters are not touched.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accel.exactness import Exactness
from accel.guard.alone import local
from accel.guard.comparison import Comparison, Tolerance, as_real, noise_like
from accel.guard.rounding import FINEST, coarser

# The first parameters up to this many elements, over all groups: enough to show a wrong formula, and cheap to copy.
_ELEMENTS = 1_000_000


def makes_updates(optimizer: Optimizer) -> bool:
    """Return whether an optimizer updates by itself: Accelerate's and SAM's step another one, which a copy shares."""
    own = vars(optimizer)
    return "param_groups" in own and not any(isinstance(value, Optimizer) for value in own.values())


def updated(optimizer: Optimizer) -> list[Tensor]:
    """Step a shadow of `optimizer` along the path its groups ask for now, and return the shadow's parameters.

    Parameters without a gradient get a fixed pseudo-random one, so that the path is exercised; not frozen ones, which
    no path updates.

    Args:
        optimizer: one that makes its updates itself: of a wrapper a copy would step the real one.
    """
    shadow = copy.copy(optimizer)
    shadow.param_groups, shadow.state = [], defaultdict(dict)
    copies: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)
    for group, chosen in zip(optimizer.param_groups, _chosen(optimizer), strict=True):
        clones = [_clone(p, generator) for p in chosen]
        shadow.param_groups.append({**group, "params": clones})
        for parameter, clone in zip(chosen, clones, strict=True):
            if parameter in optimizer.state:
                kept = optimizer.state[parameter].items()
                shadow.state[clone] = {name: v.clone() if isinstance(v, Tensor) else copy.copy(v) for name, v in kept}
        copies += clones
    # Without the hooks and schedulers' counters that the user has put on the real optimizer.
    step: Any = type(shadow).step
    getattr(step, "__wrapped__", step)(shadow)
    return [local(clone.detach()) for clone in copies]


def _chosen(optimizer: Optimizer) -> list[list[Tensor]]:
    """Return, for each group, the parameters that are stepped: one of each kind at least, since paths may differ."""
    left = _ELEMENTS
    kinds: set[Any] = set()
    chosen: list[list[Tensor]] = []
    for group in optimizer.param_groups:
        chosen.append([])
        formula = _formula(group)
        for parameter in group["params"]:
            kind = (formula, parameter.dtype, parameter.device)
            if parameter.numel() <= left or kind not in kinds:
                chosen[-1].append(parameter)
                kinds.add(kind)
                left -= parameter.numel()
    return chosen


def _formula(group: dict[str, Any]) -> tuple[Any, ...]:
    """Return which options of a group are on: a layer's own learning rate makes no other formula, no momentum does.

    The path is left out: a plan switches it between two updates, which must step the same parameters.
    """
    options = {name: value for name, value in group.items() if name not in ("foreach", "fused")}
    return tuple((name, bool(value)) for name, value in options.items() if isinstance(value, int | float | None))


def _clone(parameter: Tensor, generator: torch.Generator) -> Tensor:
    clone = parameter.detach().clone().requires_grad_()
    if parameter.grad is not None:
        clone.grad = parameter.grad.detach().clone()
    elif parameter.requires_grad:
        clone.grad = torch.empty_like(parameter.detach())
        local(clone.grad).copy_(noise_like(local(parameter), generator) * 1e-2)
    return clone


def coarsest_of(optimizer: Optimizer) -> torch.dtype:
    """Return the coarsest format within an optimizer's plain update: torch's Muon rounds to bfloat16."""
    return torch.bfloat16 if isinstance(optimizer, getattr(torch.optim, "Muon", ())) else FINEST


def compare(
    plain: list[Tensor],
    candidate: list[Tensor],
    before: list[Tensor],
    exactness: Exactness,
    coarsest: torch.dtype = FINEST,
) -> Comparison:
    """Compare two updates, relative to the size of the plain one: ‖Δ_c − Δ_r‖ ≤ tolerance · ‖Δ_r‖."""
    worst = Comparison()
    for tensors in zip(plain, candidate, before, strict=True):
        expected, actual, start = map(as_real, tensors)
        update = float(torch.linalg.vector_norm(expected.double() - start.double()))
        if not math.isfinite(update):  # the gradients or the weights are not finite, which is the run's own fault
            return Comparison(unsure="the plain update itself is not finite")
        error = float(torch.linalg.vector_norm(actual.double() - expected.double()))
        # A parameter is stored to eps relative to itself, so an update can't be known more finely than that.
        eps = torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
        grain = eps * float(torch.linalg.vector_norm(start.double()))
        tolerance = Tolerance.of(exactness, coarser(expected.dtype, coarsest)).output
        if not error <= tolerance * update + grain:
            off = error / update if update > 0 else float("inf")
            return Comparison(f"its update is off by {off:.1e}, allowed {tolerance:.1e}", 0.0, off, tolerance)
        worst = worst.merge(Comparison("", 0.0, error / update if update > 0 else 0.0, tolerance))
    return worst


def start_of(optimizer: Optimizer) -> list[Tensor]:
    """Return copies of the parameters that `updated` would step, in its order."""
    return [local(p.detach()).clone() for chosen in _chosen(optimizer) for p in chosen]


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of an optimizer's groups, such as the path of its step, as they are now."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def differ(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> bool:
    """Return whether options have been switched.

    Args:
        before: what `options_of` has returned.
        now: what it has returned later, of the same optimizer.
    """
    if [set(group) for group in before] != [set(group) for group in now]:
        return True
    return any(old[name] is not new[name] for old, new in zip(before, now, strict=True) for name in old)
