"""Whether a loss is a mean or a sum, told by losses before and after a batch has grown."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel.elastic.loss_reduction import LossReduction


def told(sizes: list[int], loss_of: object) -> tuple[LossReduction, int]:
    """Return the verdict, and how many losses of a larger batch than the first it took."""
    reduction = LossReduction()
    for number, size in enumerate(sizes):
        reduction.add(size, torch.tensor(loss_of(number, size)))  # type: ignore[operator]
        if reduction.is_sum:
            return reduction, sum(each > sizes[0] for each in sizes[: number + 1])
    return reduction, 0


@given(
    st.booleans(),
    st.floats(1e-4, 1e4),
    st.floats(0.0, 0.2),
    st.floats(-0.01, 0.0),
    st.sampled_from([1.5, 2.0, 4.0]),
    st.integers(0, 10**6),
)
def test_a_sum_is_told_from_a_mean(
    is_sum: bool, scale: float, scatter: float, slope: float, growth: float, seed: int
) -> None:
    """The loss falls, and scatters."""
    draws = random.Random(seed)
    base = 32

    def loss_of(number: int, size: int) -> float:
        value = scale * (1 + slope) ** number * draws.uniform(1 - scatter, 1 + scatter)
        return value * size if is_sum else value

    sizes = [base] * 20 + [round(base * growth)] * 30 + [round(base * growth * growth)] * 30
    reduction, _ = told(sizes, loss_of)
    assert reduction.is_sum is is_sum


def test_the_first_loss_tells_where_losses_scatter_little() -> None:
    _, losses = told([32] * 12 + [64] * 5, lambda number, size: size * (1 + 0.02 * (number % 3)))
    assert losses == 1


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda number, size: -1.0 * size,
        lambda number, size: 0.0,
        lambda number, size: float("nan"),
        lambda number, size: size * (-5.0 if number % 2 else 6.0),
    ],
)
def test_what_shows_nothing_is_no_sum(loss_of: object) -> None:
    assert not told([8] * 20 + [16] * 20, loss_of)[0].is_sum


def test_short_batches_say_nothing() -> None:
    assert not told([32] * 10 + [3] + [32] * 10 + [3], lambda number, size: float(size))[0].is_sum
