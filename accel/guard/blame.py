"""Whose fault it is when a backward pass gives a gradient that is not finite.

While strategies are on, each call of the model is kept until its gradients have been looked at: references to its
inputs, the random state before it, the gradient that arrives at its outputs. If a gradient is then not finite, the kept
calls are made again, plainly and under the strategies, and the arrived gradients sent back through both.

    they differ                                             the strategies are to blame
    they agree, and what arrived or came out is not finite  the run does this by itself
    they agree, and all is finite                           the fault did not come back: the strategies are to blame if
                                                            nothing else has a part in the gradient, i.e. there was none
                                                            before and no way leads past the calls to a parameter
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from accel.dataio.batches import tensors
from accel.guard.guard import Comparison, Recording, Replayed
from accel.run.backward import leads_past

# Micro-batches beyond these are not kept, and nobody is blamed for their gradients.
_CALLS = 4

Repeat = Callable[[Recording], tuple[Replayed, Comparison]]


class KeptCall(Recording):
    """One call under strategies, by reference."""

    def _arrive(self, number: int, gradient: Tensor) -> None:
        arrived = gradient.detach()
        self.arrived[number] = self.arrived[number] + arrived if number in self.arrived else arrived


class _Random:
    """The random state of the CPU alone: reading the others costs 20 µs, too much for each call."""

    def __init__(self) -> None:
        self._state = torch.get_rng_state()

    def restore(self) -> None:
        torch.set_rng_state(self._state)


class Blame:
    """Keep the calls of a step, and tell who is to blame for a bad gradient.

    Args:
        model: the model that is called.
        device: its device.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device.type
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.calls: list[KeptCall] = []
        """What is kept now."""
        self._nodes: set[int] = set()
        self._too_many = self._clean = self._gradients_checked = False

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> KeptCall:
        """Return what is kept of a call that is about to be made."""
        if self._gradients_checked:
            self.forget()
        autocast = torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device)
        return KeptCall(args, kwargs, _Random(), None, autocast, self._device)  # type: ignore[arg-type]

    def keep(self, call: KeptCall, outputs: Any) -> None:
        """Keep a call that was made, until its gradients have been looked at."""
        self._too_many = self._too_many or len(self.calls) >= _CALLS
        if self._too_many:
            return
        call.listen(outputs)
        self.calls.append(call)
        self._nodes |= {t.grad_fn._sequence_nr() for t in tensors(outputs) if t.grad_fn is not None}

    def backward_begins(self) -> None:
        """Look whether the gradients hold anything from before."""
        self._clean = all(p.grad is None for p in self._parameters)

    def gradients_checked(self) -> None:
        """The gradients have been looked at: the next call begins anew."""
        self._gradients_checked = True

    def forget(self) -> None:
        """Let go of all that was kept."""
        self.calls, self._nodes, self._too_many, self._gradients_checked = [], set(), False, False

    def verdict(self, roots: Iterable[Tensor] | None, repeat: Repeat) -> str:
        """Return why the strategies are to blame, or '' if they are not or it can't be shown.

        Args:
            roots: where the backward pass went out from; None if that is not known.
            repeat: makes a call again, plainly and under the strategies, and compares.
        """
        if self._too_many or not self.calls:
            return ""
        finite = True
        for call in self.calls:
            plain, finding = repeat(call)
            if finding.problem:
                return f"a gradient is not finite, and in the same call made again {finding.problem}"
            flowed = [*call.arrived.values(), *plain.outputs, *(g for g in plain.gradients if g is not None)]
            finite = finite and all(bool(t.isfinite().all()) for t in flowed if t.layout == torch.strided)
        if not finite or roots is None or not self._clean:
            return ""
        if leads_past(roots, self._nodes, {id(p) for p in self._parameters}):
            return ""
        return "a gradient is not finite, and the same call made again plainly gives one that is"
