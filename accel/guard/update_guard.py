"""The guard of optimizers: does a candidate path of the optimizer's step make the same update?

A shadow optimizer steps copies of some parameters, gradients and states, once along the plain path and once along the
candidate's. The real parameters are not touched.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accel.guard.guard import Comparison, Tolerance, as_real, noise_like
from accel.strategies.base import Exactness

# The first parameters of each group up to this many elements: enough to show a wrong formula, and cheap to copy.
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
    for group in optimizer.param_groups:
        chosen = _some(group["params"])
        clones = [_clone(p, generator) for p in chosen]
        shadow.param_groups.append({**group, "params": clones})
        for parameter, clone in zip(chosen, clones, strict=True):
            if parameter in optimizer.state:
                shadow.state[clone] = _clone_state(optimizer.state[parameter])
        copies += clones
    _unhooked_step(shadow)
    return [clone.detach() for clone in copies]


def _some(parameters: list[Tensor]) -> list[Tensor]:
    chosen: list[Tensor] = []
    elements = 0
    for parameter in parameters:
        if parameter.numel() + elements <= _ELEMENTS or not chosen:
            chosen.append(parameter)
            elements += parameter.numel()
    return chosen


def _clone(parameter: Tensor, generator: torch.Generator) -> Tensor:
    clone = parameter.detach().clone().requires_grad_()
    if parameter.grad is not None:
        clone.grad = parameter.grad.detach().clone()
    elif parameter.requires_grad:
        clone.grad = noise_like(parameter, generator) * 1e-2
    return clone


def _clone_state(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else copy.copy(value) for key, value in state.items()}


def _unhooked_step(optimizer: Optimizer) -> None:
    """Step without the hooks and schedulers' counters that the user has put on the real optimizer."""
    step: Callable[..., Any] = type(optimizer).step
    inner = getattr(step, "__wrapped__", step)
    inner(optimizer)


def compare(plain: list[Tensor], candidate: list[Tensor], before: list[Tensor], exactness: Exactness) -> Comparison:
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
        tolerance = Tolerance.of(exactness, expected.dtype).output
        if not error <= tolerance * update + grain:
            off = error / update if update > 0 else float("inf")
            return Comparison(f"its update is off by {off:.1e}, allowed {tolerance:.1e}", 0.0, off, tolerance)
        worst = worst.merge(Comparison("", 0.0, error / update if update > 0 else 0.0, tolerance))
    return worst


def start_of(optimizer: Optimizer) -> list[Tensor]:
    """Return copies of the parameters that `updated` would step, in its order."""
    return [p.detach().clone() for group in optimizer.param_groups for p in _some(group["params"])]
