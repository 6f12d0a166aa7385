"""Gradients of a step: which ones were seen, and their division by the loss scale."""

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


@torch.no_grad()
def unscale(grads: Iterable[Tensor], value: Tensor) -> Tensor:
    """Divide gradients by a scale in place, and return whether one is not finite, as 1.0 or 0.0."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(grad)
    overflows = []
    for device, own in by_device.items():
        overflow = torch.zeros((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(own, overflow, 1.0 / value.to(device))
        overflows.append(overflow)
    if not overflows:
        return torch.zeros(())
    return torch.stack([each.to(overflows[0].device) for each in overflows]).amax()
