"""The run-time watch: what a strategy may do to a run after its trial.

While a strategy is on, each call's outputs are looked at. A call that raises, or gives values that are not finite, is
made again along the plain path from the same random state; if that one is well, the strategies are at fault: they are
switched off at once and the step goes on with the plain output. If the plain path raises too, the error is the user's
and passes through. Gradients are looked at before the optimizer uses them; one that is not finite means that the update
is left out, as gradient scalers do. The size of outputs is followed too: one that has grown far beyond anything the
plain loop showed is taken for a diverging run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accel.dataio.batches import tensors
from accel.gate import Call, Gate

# Far beyond what training does in a few hundred steps, and reached fast by one that diverges.
_GROWTH = 1e3
_DIVERGED_STEPS = 20


class Watch:
    """Look at outputs and gradients while strategies are on.

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
        self._random = device.type == "cpu"

    def call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call through the strategies and see that it is well."""
        if not self._gate.wrapped:
            return call(*args, **kwargs)
        before = torch.get_rng_state() if self._random else None
        try:
            outputs = call(*args, **kwargs)
        except Exception as error:
            raised = f"it raised {type(error).__name__}: {error}"
        else:
            problem = self._problem(outputs)
            return self._again(before, problem, args, kwargs, outputs) if problem else outputs
        # Outside the handler: the user's own error must not carry this one as its context.
        return self._again(before, raised, args, kwargs)

    def _again(self, before: Tensor | None, why: str, args: Any, kwargs: Any, outputs: Any = None) -> Any:
        """Make the call again along the plain path; the strategies are to blame only if that one is well."""
        after = torch.get_rng_state()
        if before is not None:
            torch.set_rng_state(before)
        plain = self._gate.plain(*args, **kwargs)  # raises the user's own error, if it is the user's
        if outputs is not None and _size(plain) is None:
            torch.set_rng_state(after)
            return outputs
        self._trip(why)
        return plain

    def _problem(self, outputs: Any) -> str:
        if self._device.type != "cpu":
            return self._problem_late(outputs)
        size = _size(outputs)
        return "its output is not finite" if size is None else self._grown(size)

    def _problem_late(self, outputs: Any) -> str:
        norm = _norm(outputs)
        if norm is not None:
            self._late.append(norm)
        if len(self._late) <= self.LATE:
            return ""
        size = float(self._late.popleft())
        return f"an output {self.LATE} calls ago was not finite" if not math.isfinite(size) else self._grown(size)

    def _grown(self, size: float) -> str:
        self._large = self._large + 1 if 0 < self._plain_max * _GROWTH < size else 0
        if self._large < _DIVERGED_STEPS:
            return ""
        return f"outputs have grown to {size:.1e}, plain ones were at most {self._plain_max:.1e}: the run diverges"

    def learn(self, outputs: Any) -> None:
        """Take note of how large the outputs of the plain loop are."""
        size = _size(outputs)
        if size is not None:
            self._plain_max = max(self._plain_max, size)

    def gradients_are_finite(self, optimizer: Optimizer) -> bool:
        """Tell whether the gradients that `optimizer` will use are finite; on a GPU, without waiting, always."""
        if self._device.type != "cpu":
            return True
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        dense = [g for g in gradients if not g.is_sparse]
        if not dense:
            return True
        # One multi-tensor call: 12 µs for ten small tensors, against 35 µs one by one.
        return math.isfinite(math.fsum(norm.item() for norm in torch._foreach_norm(dense)))


def _norm(outputs: Any) -> Tensor | None:
    # Sparse and nested tensors have no norm to ask for.
    dense = [t.detach() for t in tensors(outputs) if t.layout == torch.strided]
    found = [t for t in dense if t.is_floating_point() and t.numel()]
    if not found:
        return None
    norms = [torch.linalg.vector_norm(t.float() if t.dtype != torch.float64 else t) for t in found]
    return norms[0] if len(norms) == 1 else torch.stack([n.float() for n in norms]).sum()


def _size(outputs: Any) -> float | None:
    """Return the norm of all outputs together, or None if it is not finite."""
    norm = _norm(outputs)
    if norm is None:
        return 0.0
    size = float(norm)
    return size if math.isfinite(size) else None
