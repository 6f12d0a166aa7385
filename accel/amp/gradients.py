"""Gradients of a step: which ones were seen, their division by the loss scale, and how they are hidden."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Seen(NamedTuple):
    """A gradient as it was."""

    gradient: weakref.ref[Tensor]
    """Not its id, which another may have when this one is gone."""
    version: int

    def is_still(self, p: Tensor) -> bool:
        """Return whether a parameter has this gradient, and nobody has written to it."""
        grad = p.grad
        return grad is not None and self.gradient() is grad and self.version == grad._version


class HiddenGradients:
    """Lets a step find no gradient, so that it changes nothing."""

    def __init__(self) -> None:
        self._hidden: list[tuple[Tensor, Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._hidden)

    def hide(self, params: Iterable[Tensor]) -> None:
        """Take gradients away for a while."""
        for p in params:
            if p.grad is not None:
                self._hidden.append((p, p.grad))
                p.grad = None

    def show(self) -> None:
        """Put them back."""
        for p, gradient in self._hidden:
            p.grad = gradient
        self._hidden.clear()

    def drop(self) -> None:
        """Let them go."""
        self._hidden.clear()


def values_of(gradient: Tensor) -> Tensor:
    """Return the values of a gradient, in its own memory: those that are stored, of a sparse one."""
    return gradient._values() if gradient.is_sparse else gradient


@torch.no_grad()
def unscale(grads: Iterable[Tensor], value: Tensor) -> Tensor:
    """Divide gradients by a scale in place, and return whether one is not finite, as 1.0 or 0.0."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(values_of(grad))
    overflows = []
    for device, own in by_device.items():
        overflow = torch.zeros((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(own, overflow, 1.0 / value.to(device))
        overflows.append(overflow)
    if not overflows:
        return torch.zeros(())
    return torch.stack([each.to(overflows[0].device) for each in overflows]).amax()
