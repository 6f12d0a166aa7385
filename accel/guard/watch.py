"""The run-time watch: checks a strategy after its trial, as long as it is on.

While a strategy is on, each call's outputs are checked. A call that raises, or returns values that are not finite or
far above any in the plain loop, is repeated along the plain path from the same random state, buffers and counters,
and the step goes on with that result. If the plain result is fine, the strategies are at fault and are switched off at
once. If it is no better, the fault is the run's own and no strategy is blamed; if it raises too, the error is the
user's and propagates.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accel.dataio.batches import tensors
from accel.guard import own_state
from accel.guard.changing_buffers import ChangingBuffers
from accel.run import backward
from accel.run.gate import Call, Gate

# Outputs don't grow so much in a few hundred healthy steps; a diverging run gets there fast.
_GROWTH = 1e3
_DIVERGED_STEPS = 20
_DIVERGES = "the run diverges"
_LONGEST_EXCUSE = 64


class Excuse:
    """How often a run that is at fault itself is not checked: once, then twice, four times, …, at most 64.

    Without it, a run whose weights are no longer finite would pay for each call twice.
    """

    def __init__(self) -> None:
        self._length = self._left = 0

    def grant(self) -> None:
        """Skip the next checks, twice as many as the last time."""
        self._left = self._length = min(2 * self._length or 1, _LONGEST_EXCUSE)

    def holds(self) -> bool:
        """Return whether this check is to be skipped, and count it."""
        if self._left == 0:
            return False
        self._left -= 1
        return True

    def clear(self) -> None:
        """The run is healthy: check every time."""
        self._length = self._left = 0


class Watch:
    """Check outputs and gradients while strategies are on.

    Args:
        gate: the model's gate; its plain path is the fallback.
        device: where the model lives. On a device that runs ahead of the host, values are read some steps late.
        trip: called with a reason when the strategies must go; they must be off when it returns.
    """

    LATE = 8
    """Calls until a value computed on a GPU is read."""

    def __init__(self, gate: Gate, device: torch.device, trip: Callable[[str], None]) -> None:
        self._gate = gate
        self._trip = trip
        self._device = device
        self._late: deque[Tensor] = deque()
        self._plain_max = 0.0
        self._large = 0
        self._moving = ChangingBuffers(gate.model)
        self._excuse = Excuse()
        self._keeps_inputs = False

    def call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call through the strategies and check its outputs.

        Activation checkpointing ends the call that it repeats in a backward pass by an error of its own, and compares
        what was saved in it: no call may follow. The same call was checked in the forward pass.
        """
        if not self._gate.wrapped or backward.is_running():
            return call(*args, **kwargs)
        given = tensors((args, kwargs))
        kept = _Inputs(given) if self._keeps_inputs else None
        before = (
            torch.get_rng_state(),
            self._moving.saved(),
            own_state.states_of(own_state.generators_given(args, kwargs)),
            kept,
        )
        written = versions(given)
        try:
            outputs = call(*args, **kwargs)
        except Exception as error:
            raised = f"it raised {type(error).__name__}: {error}"
        else:
            problem = "" if self._excuse.holds() else self._problem(outputs)
            # A forward that wrote to its inputs can't be repeated, unless they were kept; nor one that took some away.
            if not problem or len(tensors((args, kwargs))) != len(given) or (not kept and versions(given) != written):
                return outputs
            return self._again(before, problem, args, kwargs)
        # Outside the handler: the user's own error must not carry this one as its context.
        return self._again(before, raised, args, kwargs)

    def _again(self, before: Any, why: str, args: Any, kwargs: Any) -> Any:
        """Repeat the call along the plain path; the strategies are to blame only if its result is fine."""
        torch.set_rng_state(before[0])
        self._moving.restore(before[1])
        own_state.put_back(before[2])
        if before[3] is not None:
            before[3].put_back()
        plain = self._gate.plain(*args, **kwargs)  # raises the user's own error, if it is the user's
        if why.startswith("it raised") or not self._problem_now(plain):
            self._trip(why)
        else:
            self._excuse.grant()
            self.learn(plain)
        return plain

    def _problem(self, outputs: Any) -> str:
        if self._device.type == "cpu":
            problem = self._problem_now(outputs)
            self._large = self._large + 1 if problem.endswith(_DIVERGES) else 0
            problem = "" if 0 < self._large < _DIVERGED_STEPS else problem
        else:
            problem = self._problem_late(outputs)
        if not problem:
            self._excuse.clear()
        return problem

    def _problem_now(self, outputs: Any) -> str:
        size = _size(outputs)
        if size is None:
            return "its output is not finite"
        if not 0 < self._plain_max * _GROWTH < size:
            return ""
        return f"outputs have grown to {size:.1e}, plain ones were at most {self._plain_max:.1e}: {_DIVERGES}"

    def _problem_late(self, outputs: Any) -> str:
        """Check the value of some calls ago; only if it was bad, wait for the present one."""
        norm = _norm(outputs)
        if norm is not None:
            self._late.append(norm)
        if len(self._late) <= self.LATE:
            return ""
        size = float(self._late.popleft())
        grown = 0 < self._plain_max * _GROWTH < size
        self._large = self._large + 1 if grown else 0
        if math.isfinite(size) and self._large < _DIVERGED_STEPS:
            return ""
        return self._problem_now(outputs)

    def learn(self, outputs: Any) -> None:
        """Learn how large the outputs of the plain loop are."""
        self._moving.observe()
        size = _size(outputs)
        if size is not None:
            self._plain_max = max(self._plain_max, size)

    def writes_to(self, parameters: Iterable[Tensor]) -> None:
        """Learn that the model's own call writes to these parameters."""
        self._moving.add(parameters)

    def keep_inputs(self) -> None:
        """Learn that the model's own call writes to its inputs: those of the coming calls are kept, to be put back."""
        self._keeps_inputs = True

    def gradients_are_finite(self, optimizer: Optimizer) -> bool:
        """Return whether the gradients that `optimizer` will use are finite; on a GPU, without waiting, always."""
        if self._device.type != "cpu":
            return True
        gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
        dense = [g for g in gradients if g is not None and not g.is_sparse]
        # One multi-tensor call: 12 µs for ten small tensors, against 35 µs one by one.
        if not dense or math.isfinite(math.fsum(norm.item() for norm in torch._foreach_norm(dense))):
            return True
        return all(bool(g.isfinite().all()) for g in dense)  # a norm overflows before its elements do


class _Inputs:
    """What the tensors hold that a call is given."""

    def __init__(self, given: list[Tensor]) -> None:
        counted = [tensor for tensor in given if not tensor.is_inference()]
        self._kept = [(each, each.detach().clone(), each._version, each.grad_fn) for each in counted]

    def put_back(self) -> None:
        """Put it back, where a call that has failed has written to them."""
        for tensor, value, version, history in self._kept:
            if tensor._version == version:
                continue
            if history is None and tensor.grad_fn is not None and not tensor._is_view():
                tensor.detach_()
            with torch.no_grad():
                tensor.copy_(value)


def versions(given: list[Tensor]) -> list[int]:
    """Return how often the tensors that a call is given have been written to, of those that count it."""
    return [t._version for t in given if not t.is_inference()]


def _norm(outputs: Any) -> Tensor | None:
    # Sparse and nested tensors have no norm to ask for.
    dense = [t.detach() for t in tensors(outputs) if t.layout == torch.strided and not t.is_nested]
    gradients = [t for t in dense if t.is_floating_point() and t.numel()]
    if not gradients:
        return None
    norms = [torch.linalg.vector_norm(t.float() if t.dtype != torch.float64 else t) for t in gradients]
    return norms[0] if len(norms) == 1 else torch.stack([n.float() for n in norms]).sum()


def _size(outputs: Any) -> float | None:
    """Return the norm of all outputs together, or None if it is not finite."""
    norm = _norm(outputs)
    if norm is None:
        return 0.0
    size = float(norm)
    return size if math.isfinite(size) else None
