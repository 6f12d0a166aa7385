"""Gradients of a step: which ones were seen and wait, their division by the loss scale, and how they are hidden."""

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


def seen(params: Iterable[Tensor]) -> dict[Tensor, Seen]:
    """Return which gradients there are, and how often each has been written to."""
    return {p: Seen(weakref.ref(p.grad), p.grad._version) for p in params if p.grad is not None}


class ScaledGradients:
    """The gradients that scaled backward passes have left to an optimizer, and which of them wait for its step."""

    def __init__(self) -> None:
        self._left: dict[Tensor, Seen] = {}
        """All that were there when the last pass ended, unless a step has come since."""
        self._waiting: dict[Tensor, Seen] = {}
        """Those of them that passes have written: others are of an earlier step, or zeros."""
        self._before: dict[Tensor, Seen] | None = None
        """What was there when the pass began that is under way; None where none is."""
        self._taken: set[Tensor] = set()
        """Whose gradients a step within it has taken: what is written there afterwards are zeros."""

    def __bool__(self) -> bool:
        return bool(self._left)

    @property
    def wait(self) -> bool:
        """Whether some wait for their step; those that were zeroed since do not."""
        return any(own.is_still(p) for p, own in self._waiting.items())

    def begin(self, params: Iterable[Tensor]) -> None:
        """Be told that a pass begins. One within another is a part of it, and so is what one has left that failed."""
        self._taken = set()
        if self._before is None:
            self._before = seen(params)

    def end(self, params: Iterable[Tensor]) -> None:
        """Be told that a pass has ended."""
        before, self._before = self._before or {}, None
        self._left = seen(params)
        waited = {p for p, own in self._waiting.items() if own.is_still(p)}
        unwritten = self._taken | {p for p, own in before.items() if own.is_still(p)}
        self._waiting = {p: own for p, own in self._left.items() if p in waited or p not in unwritten}

    def forget(self, params: Iterable[Tensor]) -> None:
        """Be told that a step has taken them, perhaps within the pass: that may leave others yet."""
        self._left, self._waiting = {}, {}
        if self._before is not None:
            self._before = seen(params)
            self._taken = set(self._before)

    def was_changed(self, p: Tensor) -> bool:
        """Return whether someone has written to a gradient since the last pass; within one nobody can tell."""
        own = self._left.get(p)
        return self._before is None and own is not None and own.gradient() is p.grad and not own.is_still(p)


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
