"""The guard compares complex numbers by both of their parts, without a warning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.guard import guard, update_guard
from accel.guard.guard import Comparison, Tolerance
from accel.strategies.base import Exactness

CPU = torch.device("cpu")
SIZE = 256
pytestmark = pytest.mark.filterwarnings("error")


class Spectral(nn.Module):
    """One complex layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, 8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.weight.dtype) @ self.weight


class Conjugated(torch.autograd.Function):
    """Passes values on, and the conjugate of their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.conj()


def checked(
    wrap: Callable[[Spectral], Callable[[Tensor], Tensor]],
    exactness: Exactness = Exactness.REORDERED,
    *,
    backward: bool = True,
) -> Comparison:
    """Record one real step, then compare the plain call with a wrapped one."""
    torch.manual_seed(0)
    model, x = Spectral(), torch.randn(16, SIZE)
    recording = guard.record(model, CPU, (x,), {})
    out = model(x)
    if backward:
        recording.listen(out)
        out.abs().square().mean().backward()
    plain = guard.replay(model, model, recording)
    return guard.compare(plain, guard.replay(model, wrap(model), recording), exactness)


def reordered(model: Spectral) -> Callable[[Tensor], Tensor]:
    order = torch.randperm(SIZE)
    return lambda x: x[:, order].to(model.weight.dtype) @ model.weight[order]


def conjugated_twice(model: Spectral) -> Callable[[Tensor], Tensor]:
    return lambda x: (x.to(model.weight.dtype) @ model.weight.conj()).conj()


def test_another_order_passes_and_is_measured() -> None:
    finding = checked(reordered)
    assert finding.problem == ""
    assert 0 < finding.output_error < 1e-4
    assert "has other bits" in checked(reordered, Exactness.EXACT).problem


def test_an_output_that_is_still_to_be_conjugated_is_compared() -> None:
    assert checked(conjugated_twice).problem == ""
    assert checked(lambda model: model, Exactness.EXACT).problem == ""


def test_a_wrong_imaginary_output_is_found() -> None:
    def wrong(model: Spectral) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.complex(model(x).real, 1.01 * model(x).imag)

    assert "its output is off by" in checked(wrong).problem


def test_an_output_that_is_not_finite_is_found() -> None:
    assert "not finite, unlike the plain one" in checked(lambda model: lambda x: model(x) * complex(1, 1e39)).problem


@pytest.mark.parametrize("backward", [True, False])
def test_a_wrong_imaginary_gradient_is_found(backward: bool) -> None:
    def wrong(model: Spectral) -> Callable[[Tensor], Tensor]:
        return lambda x: x.to(model.weight.dtype) @ Conjugated.apply(model.weight)  # type: ignore[no-untyped-call]

    assert "its gradient for weight is off by" in checked(wrong, backward=backward).problem
    assert "its gradient for weight has other bits" in checked(wrong, Exactness.EXACT, backward=backward).problem


@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_wrong_imaginary_update_is_found(has_gradient: bool) -> None:
    torch.manual_seed(0)
    model = Spectral()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if has_gradient:
        model(torch.randn(16, SIZE)).abs().square().mean().backward()
    start, plain = update_guard.start_of(optimizer), update_guard.updated(optimizer)

    def compared(change: Callable[[Tensor], Tensor]) -> str:
        candidate = [before + change(after - before) for before, after in zip(start, plain, strict=True)]
        return update_guard.compare(plain, candidate, start, Exactness.REORDERED).problem

    assert compared(lambda update: update * (1 + 1e-5)) == ""
    assert "its update is off by" in compared(lambda update: update.conj().resolve_conj())


@pytest.mark.parametrize("exactness", list(Exactness))
def test_a_complex_dtype_is_as_precise_as_its_parts(exactness: Exactness) -> None:
    for dtype, part in ((torch.complex64, torch.float32), (torch.complex128, torch.float64)):
        assert Tolerance.of(exactness, dtype) == Tolerance.of(exactness, part)
