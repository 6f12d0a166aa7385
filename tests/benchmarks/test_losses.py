"""Losses that a loop notes must not change what is measured of it."""

from __future__ import annotations

import gc

import torch

from benchmarks.losses import Losses


def test_losses_are_numbers_in_their_order_and_none_is_kept_alive() -> None:
    """Tensors that were kept, one of each step, once let the heap grow to twenty times what the steps needed."""
    before = _scalars()
    losses = Losses(torch.device("cpu"))
    count = (1 << 14) + 5
    for step in range(count):
        losses.add(torch.tensor(float(step), requires_grad=True))
    numbers = losses.numbers()
    assert numbers == [float(step) for step in range(count)]
    assert _scalars() < before + 100


def _scalars() -> int:
    """Return how many tensors of no dimension there are."""
    gc.collect()
    return sum(type(each) is torch.Tensor and each.dim() == 0 for each in gc.get_objects())
