"""How large a model's outputs are: learnt from plain calls, and judged in those under strategies."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
from torch import Tensor

from accel.profiler.trees import tensors

# Outputs don't grow so much in a few hundred healthy steps; a diverging run gets there fast.
_GROWTH = 1e3
_DIVERGED_STEPS = 20
_DIVERGES = "the run diverges"
_LATE = 8
"""Calls until a value computed on a GPU is read, at the earliest."""

_SAMPLE = 2**20
"""Elements of an output on a device that are looked at."""


class OutputSizes:
    """Judge outputs: they must be finite, and not far larger than any in the plain loop."""

    def __init__(self) -> None:
        self._late, self._learnt = LateValues(_LATE), LateValues(0)
        self._plain_max = 0.0
        self._large = 0

    def problem(self, outputs: Any) -> str:
        """Return what is wrong with the outputs of a call under strategies; '' if nothing is."""
        problem = self.problem_now(outputs)
        self._large = self._large + 1 if problem.endswith(_DIVERGES) else 0
        return "" if 0 < self._large < _DIVERGED_STEPS else problem

    def problem_now(self, outputs: Any) -> str:
        """Judge one call by itself."""
        size = _size(outputs)
        if size is None:
            return "its output is not finite"
        if not 0 < self._plain_max * _GROWTH < size:
            return ""
        return f"outputs have grown to {size:.1e}, plain ones were at most {self._plain_max:.1e}: {_DIVERGES}"

    def problem_late(self, outputs: Any) -> str:
        """Check the values of some calls ago that have arrived; only if one was bad, wait for the present one."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            return ""  # a graph of the loop's own: nothing in it has a value yet
        norm = _norm(outputs)
        if norm is not None:
            self._late.note(norm)
        self._learn_sizes()  # those of the last plain calls
        was_bad = [self._is_bad(size) for size in self._late.due()]  # all are counted
        return self.problem_now(outputs) if any(was_bad) else ""

    def _is_bad(self, size: float) -> bool:
        grown = 0 < self._plain_max * _GROWTH < size
        self._large = self._large + 1 if grown else 0
        return not math.isfinite(size) or self._large >= _DIVERGED_STEPS

    def learn(self, outputs: Any) -> None:
        """Learn how large the outputs of the plain loop are.

        On a GPU without waiting here either: trials compare such calls with those under a strategy.
        """
        norm = _norm(outputs)
        if norm is not None:
            self._learnt.note(norm)
        self._learn_sizes()

    def _learn_sizes(self) -> None:
        """Learn the sizes of plain outputs that have arrived."""
        self._plain_max = max([self._plain_max, *filter(math.isfinite, self._learnt.due())])


class LateValues:
    """Numbers, one a call, that are read some calls late and in their order, without waiting for what was queued since.

    `item()` copies on the current stream, and so waits for all that was launched before it: however old the value of a
    GPU is, the host loses its lead. So it is copied to page-locked memory where it is computed, and read once the event
    behind that copy has come. Only where very many are under way is the oldest waited for.

    Args:
        calls: values that are always under way; the youngest ones.
        most: values that may be under way; beyond it the oldest is waited for.
    """

    def __init__(self, calls: int, most: int = 64) -> None:
        self._calls, self._most = calls, most
        self._under_way: deque[tuple[Tensor, Any]] = deque()
        """Each with the event that tells when it is there; None for one of the host."""

    def note(self, value: Tensor) -> None:
        """Add the value of the present call."""
        self._under_way.append(_on_its_way(value))

    def due(self) -> list[float]:
        """Return those of enough calls ago that have arrived since, the oldest first."""
        values: list[float] = []
        while len(self._under_way) > self._calls:
            number, event = self._under_way[0]
            if event is not None and not event.query():
                if len(self._under_way) <= self._most:
                    break
                event.synchronize()
            self._under_way.popleft()  # first: one that can't be read must not hold up the others
            values.append(float(number))
        return values


def _on_its_way(value: Tensor) -> tuple[Any, Any]:
    """Return a number and the event that tells when it is there: a copy in page-locked memory, of a value of a GPU.

    That memory torch's allocator has from earlier copies.
    """
    if not value.is_cuda:
        return value, None
    number = torch.empty((), dtype=value.dtype, device="cpu", pin_memory=True)
    number.copy_(value, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(value.device))
    return number, event


def _norm(outputs: Any) -> Tensor | None:
    # Sparse and nested tensors have no norm to ask for, and those of the meta device no values.
    dense = [t.detach() for t in tensors(outputs) if t.layout == torch.strided and not (t.is_nested or t.is_meta)]
    numbers = [t for t in dense if (t.is_floating_point() or t.is_complex()) and t.numel()]
    return _total([_norm_of(t) for t in numbers]) if numbers else None


def _norm_of(tensor: Tensor) -> Tensor:
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()  # this rank's part: for the whole all ranks would have to talk
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    part = tensor if tensor.device.type == "cpu" else sample(tensor)
    norm: Tensor = torch.linalg.vector_norm(part if part.dtype == torch.float64 else part.float())
    return norm if part is tensor else norm * math.sqrt(tensor.numel() / part.numel())


def sample(tensor: Tensor) -> Tensor:
    """Return at most 2^20 elements, from all over a contiguous tensor; any other as it is.

    The logits of a language model are 2 GB, which took 0.5 ms in each call of BERT-base on an H200. The step is odd, so
    that it meets all columns where their number is a power of two.
    """
    step = -(-tensor.numel() // _SAMPLE) | 1
    return tensor.view(-1)[::step] if step > 1 and tensor.is_contiguous() else tensor


def _total(norms: list[Tensor]) -> Tensor:
    """Return the sum of norms; on a GPU if one of them is there, so that the host needn't wait for it."""
    if len(norms) == 1:
        return norms[0]
    place = next((norm.device for norm in norms if norm.device.type != "cpu"), norms[0].device)
    return torch.stack([norm.to(place, torch.float32, non_blocking=True) for norm in norms]).sum()


def _size(outputs: Any) -> float | None:
    """Return the norm of all outputs together, or None if it is not finite."""
    norm = _norm(outputs)
    if norm is None:
        return 0.0
    size = float(norm)
    return size if math.isfinite(size) else None
