"""Gradients of a step: which ones were seen and wait, their division by the loss scale, and how they are hidden."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, MutableMapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_clock = itertools.count(1)
_taken_at: MutableMapping[Tensor, int] = WeakIdKeyDictionary()
"""Memory of which several gradients are views → when an optimizer has last taken its own of them."""


class Seen(NamedTuple):
    """A gradient as it was."""

    gradient: weakref.ref[Tensor]
    """Not its id, which another may have when this one is gone."""
    version: int
    at: int

    def is_still(self, p: Tensor) -> bool:
        """Return whether a parameter has this gradient, and nobody is known to have written to it."""
        grad = p.grad
        if grad is None or self.gradient() is not grad:
            return False
        return self.version == grad._version or _is_shared_since(grad, self.at)


def seen(params: Iterable[Tensor]) -> dict[Tensor, Seen]:
    """Return which gradients there are, and how often each has been written to."""
    now = next(_clock)
    return {p: Seen(weakref.ref(p.grad), p.grad._version, now) for p in params if p.grad is not None}


def take_memory(params: Iterable[Tensor]) -> None:
    """Be told that an optimizer's gradients are its loop's to clip and to clear from now on.

    Views of one bucket of DistributedDataParallel count their writes together: what was seen of other optimizers'
    gradients there says nothing any more.
    """
    bases = {id(base): base for p in params if p.grad is not None and (base := p.grad._base) is not None}
    now = next(_clock) if bases else 0
    for base in bases.values():
        _taken_at[base] = now


def _is_shared_since(gradient: Tensor, at: int) -> bool:
    base = gradient._base
    return base is not None and _taken_at.get(base, 0) > at


class ScaledGradients:
    """The gradients that scaled backward passes have left to an optimizer, and which of them wait for its step."""

    def __init__(self) -> None:
        self.came_through = False
        """A scaled backward pass has begun since the optimizer's last step."""
        self._left: dict[Tensor, Seen] = {}
        """All that were there when the last pass ended, unless a step has come since."""
        self._waiting: dict[Tensor, Seen] = {}
        """Those of them that passes have written: others are of an earlier step, or zeros."""
        self._before: dict[Tensor, Seen] | None = None
        """What was there when the pass began that is under way; None where none is."""
        self._taken: set[Tensor] = set()
        """Whose gradients a step within it has taken: what is written there afterwards are zeros."""
        self._has_stepped = False
        """A step has come within the pass."""

    def __bool__(self) -> bool:
        return bool(self._left)

    def waiting(self) -> list[Tensor]:
        """Return those that may wait for their step.

        Zeros among them do not. Not all of these are known: CUDA's kernels that clear many at once count no writes.
        """
        return [p.grad for p, own in self._waiting.items() if p.grad is not None and own.is_still(p)]

    def begin(self, params: Iterable[Tensor]) -> None:
        """Be told that a pass begins. One within another is a part of it, and so is what one has left that failed."""
        self._taken, self._has_stepped, self.came_through = set(), False, True
        if self._before is None:
            self._before = seen(params)

    def end(self, params: Iterable[Tensor]) -> None:
        """Be told that a pass has ended."""
        before, self._before = self._before or {}, None
        self.came_through = self.came_through and not self._has_stepped
        self._left = seen(params)
        waited = {p for p, own in self._waiting.items() if own.is_still(p)}
        unwritten = self._taken | {p for p, own in before.items() if own.is_still(p)}
        self._waiting = {p: own for p, own in self._left.items() if p in waited or p not in unwritten}

    def take(self, params: Iterable[Tensor]) -> None:
        """Be told that a step has taken them, perhaps within the pass: gradients of its own may come after it."""
        self.came_through = self._has_stepped = self._before is not None
        self.forget(params)

    def forget(self, params: Iterable[Tensor]) -> None:
        """Leave those out that are there; a pass under way may leave others yet."""
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
def any_value(grads: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return whether one of some gradients has a value other than 0, as a tensor on a device: nothing waits for it."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for values in map(values_of, grads):
        if values.numel():
            by_kind.setdefault((values.device, values.dtype), []).append(values)
    largest = [torch.stack(torch._foreach_norm(own, torch.inf)).any().to(device) for own in by_kind.values()]
    return torch.stack([torch.zeros((), dtype=torch.bool, device=device), *largest]).any()


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
