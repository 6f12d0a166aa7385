"""Which loader the loop trains on, where it iterates more than one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel.session.training_loader import TrainingLoader


def successor_after(steps: int, before_each: str) -> Any:
    """What the loop has gone on to after so many steps on a second loader, each after a batch of the first one."""
    first, second = (SimpleNamespace(_accel_loader=DataLoader([1, 2])) for _ in range(2))
    run = SimpleNamespace(loader=first._accel_loader, optimizers=[None])
    training: Any = TrainingLoader(run)  # type: ignore[arg-type]
    training.turns_to(first)
    training.source = training.delivered
    training.successor()
    for _ in range(steps):
        if before_each:
            with torch.set_grad_enabled(before_each == "trained on"):
                training.turns_to(first)
        training.turns_to(second)
        training.source = training.delivered
        if training.successor() is not None:
            return "second"
    return "first"


@pytest.mark.parametrize(
    ("before_each", "trained_on"), [("trained on", "first"), ("validated", "second"), ("", "second")]
)
def test_a_loader_that_serves_each_step_together_with_another_is_trained_on(before_each: str, trained_on: str) -> None:
    assert successor_after(40, before_each) == trained_on
