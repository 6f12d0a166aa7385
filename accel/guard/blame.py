"""Decide whether the strategies are to blame for a gradient that is not finite.

While strategies are on, each call of the model is kept until its gradients have been checked:
references to its inputs, the random state before it, the gradient that arrived at its outputs. If a
gradient is then not finite, the kept calls are replayed plainly and under the strategies, and the
arrived gradients are sent back through both.

    they differ                                             the strategies are to blame
    they agree, and what arrived or came out is not finite  the run does this without strategies too
    they agree, and all is finite                           the fault was not reproduced: the strategies are to blame if
                                                            nothing else contributes to the gradient, i.e. there was
                                                            none before and no path to a parameter bypasses the calls
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from accel.guard.comparison import Comparison, Replayed
from accel.guard.guard import Recording
from accel.profiler.loop.backward import leads_past
from accel.profiler.trees import tensors

# In a step with more micro-batches, calls are not kept, and no strategy is blamed for gradients.
_CALLS = 4

Repeat = Callable[[Recording], tuple[Replayed, Comparison]]


def _let_pass(gradient: Tensor) -> None:
    """Note nothing of it."""


@dataclass
class KeptCall(Recording):
    """One call under strategies, by reference."""

    note: Callable[[Tensor], None] = _let_pass
    """Is given each gradient that arrives, in the backward pass."""

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

    def __init__(self, model: nn.Module, note: Callable[[Tensor], None] = _let_pass) -> None:
        self._model, self._note = model, note
        self._parameters = list(map(weakref.ref, model.parameters()))
        """As far as they are known: to list them takes longer than all else that is done in each step."""
        self.calls: list[KeptCall] = []
        """The calls that are kept now."""
        self._nodes: set[int] = set()
        self._too_many = self._clean = self._gradients_checked = False

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
        self._nodes |= {t.grad_fn._sequence_nr() for t in tensors(outputs) if t.grad_fn is not None}

    def backward_begins(self) -> None:
        """Record whether there are gradients from before."""
        try:  # before each backward pass, so without Python for each
            self._clean = all(map(_IS_NONE, map(_GRAD, map(_referent, self._parameters))))
        except AttributeError:  # one is gone
            self._clean = all(each is None or each.grad is None for each in map(_referent, self._parameters))

    def gradients_checked(self) -> None:
        """The gradients have been checked: the next call starts a new collection."""
        self._gradients_checked = True

    def forget(self) -> None:
        """Release all kept calls."""
        for call in self.calls:
            call.forget()
        self.calls, self._nodes, self._too_many, self._gradients_checked = [], set(), False, False

    def verdict(self, roots: Iterable[Tensor] | None, repeat: Repeat) -> str:
        """Return why the strategies are to blame, or '' if they are not or it can't be shown.

        Args:
            roots: where the backward pass started; None if that is not known.
            repeat: replays a call plainly and under the strategies, and compares.
        """
        if self._too_many or not self.calls:
            return ""
        finite = True
        for call in self.calls:
            plain, finding = repeat(call)
            if finding.problem:
                return f"a gradient is not finite, and in the same call made again {finding.problem}"
            flowed = [*call.arrived.values(), *plain.outputs, *(g for g in plain.gradients if g is not None)]
            finite = finite and all(
                bool(t.isfinite().all()) for t in flowed if t.layout == torch.strided and not t.is_nested
            )
        if not finite or roots is None or not self._was_clean():
            return ""
        if leads_past(roots, self._nodes, set(map(id, self._model.parameters()))):
            return ""
        return "a gradient is not finite, and the same call made again plainly gives one that is"

    def _was_clean(self) -> bool:
        """Return whether it is certain that there were no gradients from before.

        Where a loop has put other parameters into the model it is not, the first time that it is asked.
        """
        parameters = list(self._model.parameters())
        if set(map(id, parameters)) == set(map(id, map(_referent, self._parameters))):
            return self._clean
        self._parameters = list(map(weakref.ref, parameters))
        return False


_referent: Any = weakref.ref.__call__
_GRAD, _IS_NONE = attrgetter("grad"), partial(is_, None)
