"""A loss that falls is told from one that doesn't, also where a few hundred steps don't show it."""

from __future__ import annotations

import math

import pytest
import torch

from accel.elastic.batch_size.run_noise import LossTrend, loss_of

SCATTER = 0.12
"""Of the loss of a batch of 32 images."""


def losses(trend: LossTrend, begin: float, slope: float, count: int, seed: int = 0) -> list[bool]:
    """Feed a line with noise, and return what was said every 64 passes."""
    noise = SCATTER * torch.randn(count, generator=torch.Generator().manual_seed(seed))
    said = []
    for step in range(count):
        trend.add((begin + slope * step + noise[step]).clone())
        if step % 64 == 63:
            said.append(trend.falls())
    return said


def test_a_slow_fall_is_seen_over_the_run() -> None:
    """0.1 in 1,000 steps, as Fashion-MNIST's loss falls from 0.5: within 512 it is less than the scatter."""
    trend = LossTrend()
    said = losses(trend, 0.5, -1e-4, 4096)
    assert all(said[len(said) // 2 :])


def test_the_long_look_forgets_what_the_first_weights_were_wrong_by() -> None:
    trend = LossTrend()
    losses(trend, 2.0, -0.01, 128)
    said = losses(trend, 0.7, 0.0, 8192, seed=1)
    assert not any(said[8:])


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_does_not_fall_is_never_said_to(seed: int) -> None:
    assert not any(losses(LossTrend(), 0.7, 0.0, 8192, seed))


def test_a_rising_loss_and_values_that_are_not_finite_do_not_fall() -> None:
    trend = LossTrend()
    assert not any(losses(trend, 0.5, 1e-4, 4096))
    for _ in range(64):
        trend.add(torch.tensor(math.nan))
    assert not trend.falls()


def test_a_loss_is_the_first_single_number_that_a_backward_pass_begins_at() -> None:
    weight = torch.ones(2, requires_grad=True)
    loss = weight.sum()
    assert loss_of([torch.ones(4), torch.tensor(3)]) is None
    first = loss_of([torch.ones(4), loss, torch.tensor(1.0)])
    assert first is not None and first == 2 and not first.requires_grad
