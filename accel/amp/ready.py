"""Gradients that are ready for the step: float32, no longer scaled, and perhaps clipped by the loop since."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accel.amp.gradients import Seen, seen, take_memory, unscale

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Parameters, each with what the step updates: its master weights, or itself."""


class ReadyGradients:
    """Gives what the step updates its gradients, each once, and knows of which gradients of the model they are made."""

    def __init__(self) -> None:
        self.overflow: Tensor | None = None
        """Whether gradients overflowed, once they are ready; None before that."""
        self.are_scaled = False
        """They were made without a scale."""
        self._made_of: dict[Tensor, Seen] = {}
        """Parameter with masters → the gradient that theirs was made of."""
        self._divided: dict[Tensor, Seen] = {}
        """Parameter without → its gradient, which was divided in place."""
        self._is_closed = False
        """Whoever writes to those from now on makes others of them."""

    def forget(self) -> None:
        """Begin anew: the step is over, or the gradients are others."""
        self.overflow, self.are_scaled, self._made_of, self._divided = None, False, {}, {}
        self._is_closed = False

    def close(self) -> None:
        """Be told that the model is called again: what comes after clipping is a backward pass of another step.

        Gradients that were cleared in place are the same tensors in it.
        """
        if not self._is_closed:
            self._divided = seen([p for p in self._divided if self._was_divided(p)])
            self._is_closed = True

    def are_all(self, pairs: Pairs) -> bool:
        """Return whether all gradients that are there now are ready."""
        there = [(p, own) for p, own in pairs if p.grad is not None]
        if self.overflow is None or {p for p, own in there if own is not p} != set(self._made_of):
            return False
        if self._made_of:
            return all(own.is_still(p) for p, own in self._made_of.items())
        return all(self._was_divided(p) for p, _ in there)  # there are no masters, which would tell

    def has(self, p: Tensor, master: Tensor | None) -> bool:
        """Return whether the gradient of one parameter is ready.

        Args:
            p: the parameter, which has one.
            master: its master weights, if it has some.
        """
        if master is not None:
            return master.grad is not None and p in self._made_of and self._made_of[p].is_still(p)
        if self.are_scaled or not self._was_divided(p):
            return False
        # Clipping may have written to it, or a new backward pass: that writes to all.
        return not self._made_of or any(own.is_still(other) for other, own in self._made_of.items())

    def _was_divided(self, p: Tensor) -> bool:
        own = self._divided.get(p)
        if own is None:
            return False
        return own.is_still(p) if self._is_closed else own.gradient() is p.grad

    def make(self, pairs: Pairs, scale: Tensor | None) -> None:
        """Give all their gradients that have not got them yet.

        Args:
            pairs: of the optimizer.
            scale: to divide by; None for none.
        """
        ready: list[Tensor] = []
        scaled: list[Tensor] = []
        for p, own in pairs:
            if p.grad is None:
                own.grad = None
                continue
            is_ready = self.has(p, None if own is p else own)
            if not is_ready and own is not p:
                own.grad = p.grad.float()
            assert own.grad is not None
            (ready if is_ready else scaled).append(own.grad)
        self.overflow = torch.zeros(()) if scale is None else unscale(scaled, scale)
        if ready and scale is not None:  # what is infinite among all of them
            self.overflow = unscale([*ready, *scaled], torch.ones_like(scale))
        self._note(pairs, scale)

    def _note(self, pairs: Pairs, scale: Tensor | None) -> None:
        take_memory(p for p, own in pairs if own is p)  # the loop may clip them in place
        self._made_of = seen(p for p, own in pairs if own is not p)
        self._divided = seen(p for p, own in pairs if own is p)
        self.are_scaled, self._is_closed = scale is None, False
