"""Where steps end in loops without a loader, once the optimizer that ended them is gone."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accel.run import ranks
from accel.script.own_batches import UpdateBoundary


def ended(updates: int, *, is_freed: bool) -> list[bool]:
    """Return which updates of a second optimizer have ended a step; the first one has stepped three times before."""
    first, second = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    boundary, requests = UpdateBoundary(), list[int]()
    for _ in range(3):
        boundary.updated(first)
    if is_freed:
        del first
        gc.collect()
    listener: Any = SimpleNamespace(batch_requested=lambda: requests.append(1), batch_delivered=lambda batch: None)
    boundary.proxy._accel_listener = listener
    found = []
    for _ in range(updates):
        boundary.updated(second)
        found.append(bool(requests))
        requests.clear()
    return found


def test_another_optimizer_ends_the_steps_at_once() -> None:
    assert ended(5, is_freed=True) == [True] * 5


def test_ranks_end_the_same_steps_whenever_each_frees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that began earlier would wait for the others, and these, in a reduction of gradients, for it."""
    monkeypatch.setattr(ranks, "are_several", lambda: True)
    assert ended(55, is_freed=True) == ended(55, is_freed=False) == [False] * 50 + [True] * 5
