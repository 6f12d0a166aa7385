"""What a comparison takes: the numbers are double, and only a piece of a tensor is at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accel.guard import comparison, guard
from accel.guard.guard import Replayed
from accel.strategies.base import Exactness


class Doubles(TorchDispatchMode):
    """Notes how large the double tensors are that are made in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float64:
            self.most = max(self.most, result.numel())
        return result


def replayed(outputs: list[Tensor], gradients: list[Tensor | None]) -> Replayed:
    return Replayed(outputs, gradients, [f"weight {i}" for i in range(len(gradients))])


def test_large_tensors_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_PIECE", 1000)
    torch.manual_seed(0)
    output, gradient = torch.randn(70, 100), torch.randn(4, 30, 5, 20).to(memory_format=torch.channels_last)
    off = gradient * (1 + 1e-3 * torch.randn_like(gradient))
    with Doubles() as doubles:
        finding = guard.compare(
            replayed([output], [gradient]), replayed([output + 1e-5], [off.contiguous()]), Exactness.REORDERED
        )
    assert 0 < doubles.most <= 1000
    assert finding.problem == ""
    assert math.isclose(finding.output_error, 1e-5, rel_tol=0.05)
    expected = float((off.double() - gradient.double()).norm() / gradient.double().norm())
    assert math.isclose(finding.gradient_error, expected, rel_tol=1e-6)


def test_a_fault_in_the_last_piece_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_PIECE", 1000)
    torch.manual_seed(0)
    gradient = torch.randn(3500)
    wrong = gradient.clone()
    wrong[3200:] = 0
    finding = guard.compare(replayed([], [gradient]), replayed([], [wrong]), Exactness.REORDERED)
    assert finding.unsure  # no outputs
    output = torch.ones(2)
    finding = guard.compare(replayed([output], [gradient]), replayed([output], [wrong]), Exactness.REORDERED)
    assert "weight 0 is off" in finding.problem


def test_numbers_that_are_not_finite_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_PIECE", 2)
    good, endless = torch.ones(4), torch.tensor([math.inf, 1.0, -math.inf, 1.0])
    output = torch.ones(2)
    plain, candidate = replayed([output], [endless, good]), replayed([output], [endless, good])
    assert guard.compare(plain, candidate, Exactness.REORDERED).problem == ""
    finding = guard.compare(replayed([output], [good, good]), replayed([output], [endless, good]), Exactness.REORDERED)
    assert "weight 0 is off" in finding.problem
