"""Decide whether the strategies are to blame for a gradient that is not finite.

While strategies are on, each call of the model is kept until its gradients have been checked:
references to its inputs, the random state before it, the gradient that arrived at its outputs. If a
gradient is then not finite, the kept calls are replayed plainly and under the strategies, and the
arrived gradients are sent back through both. If these differ, the strategies are to blame. If they
agree, the run does this without strategies too, or the fault did not come back, which proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel.guard.comparison import Comparison
from accel.guard.guard import Recording

# In a step with more micro-batches, calls are not kept, and no strategy is blamed for gradients.
_CALLS = 4

Repeat = Callable[[Recording], Comparison]


def _let_pass(gradient: Tensor) -> None:
    """Note nothing of it."""


@dataclass
class KeptCall(Recording):
    """One call under strategies, by reference."""

    note: Callable[[Tensor], None] = _let_pass

    def _arrive(self, number: int, gradient: Tensor) -> None:
        self.note(gradient)
        arrived = gradient.detach()
        self.arrived[number] = self.arrived[number] + arrived if number in self.arrived else arrived


class _Random:
    """The CPU's random state only: reading the others costs 20 µs, too much for each call."""

    def __init__(self) -> None:
        self._state = torch.get_rng_state()
        self.restore = self.restore_generators
        """Puts back what replays of the call change, too, once that is kept."""

    def restore_generators(self) -> None:
        torch.set_rng_state(self._state)


class Blame:
    """Keep the calls of a step on the CPU, and decide whether strategies are to blame for a bad gradient.

    Args:
        note: is given the gradients that arrive at its outputs, in the backward pass.
    """

    def __init__(self, note: Callable[[Tensor], None] = _let_pass) -> None:
        self._note = note
        self.calls: list[KeptCall] = []
        self._too_many = self._gradients_checked = False

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> KeptCall:
        """Return the record of a call that is about to be made."""
        if self._gradients_checked:
            self.forget()
        autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return KeptCall(args, kwargs, _Random(), autocast, "cpu", note=self._note)  # type: ignore[arg-type]

    def keep(self, call: KeptCall, outputs: Any) -> None:
        """Keep a call that was made, until its gradients have been checked."""
        self._too_many = self._too_many or len(self.calls) >= _CALLS
        if self._too_many:
            return
        call.listen(outputs)
        self.calls.append(call)

    def gradients_checked(self) -> None:
        """The gradients have been checked: the next call starts a new collection."""
        self._gradients_checked = True

    def forget(self) -> None:
        """Release all kept calls."""
        for call in self.calls:
            call.forget()
        self.calls, self._too_many, self._gradients_checked = [], False, False

    def verdict(self, repeat: Repeat) -> str:
        """Return why the strategies are to blame, or '' if they are not or it can't be shown.

        Args:
            repeat: replays a call plainly and under the strategies, and compares.
        """
        for call in [] if self._too_many else self.calls:
            finding = repeat(call)
            if finding.problem:
                return f"a gradient is not finite, and in the same call made again {finding.problem}"
        return ""
