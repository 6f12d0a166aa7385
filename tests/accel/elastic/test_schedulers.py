"""Learning-rate schedulers in checkpoints: they go on where they were, and one that no checkpoint holds is told of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.elastic.checkpoint import Checkpoints
from accel.elastic.options import Checkpointing
from accel.elastic.training_state import capture_state, restore_state

STEPS = 12

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 7, 7, 9]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=8),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=10),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.MultiStepLR(o, [2, 4])], milestones=[3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [4, 6])]
    ),
}


def made(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, optimizer, SCHEDULERS[kind](optimizer)


def rates(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        optimizer.step()
        schedule.step(*([1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_each_goes_on_as_if_it_had_not_been_stopped(kind: str, tmp_path: Path) -> None:
    """MultiStepLR's milestones counted twice after each resume: each of them lowered the rate so often."""
    model, optimizer, schedule = made(kind)
    whole = rates(optimizer, schedule, STEPS)
    model, optimizer, schedule = made(kind)
    found = rates(optimizer, schedule, 3)
    for steps in (3, STEPS - 6):
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(capture_state(model, optimizer, schedule))
        model, optimizer, schedule = made(kind)
        state = checkpoints.load_latest()
        assert state is not None
        restore_state(state, model, optimizer, schedule)
        found += rates(optimizer, schedule, steps)
    assert found == whole


class Own:
    """Steps by itself, as a scheduler of another library that is kept in `more`."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize(
    ("scheduled", "named", "warned"),
    [
        (True, lambda schedule: {}, True),
        (True, lambda schedule: {"more": {"scaler": torch.amp.GradScaler("cpu")}}, True),
        (True, lambda schedule: {"schedulers": [schedule]}, False),
        (True, lambda schedule: {"more": {"schedule": schedule}}, False),
        (True, lambda schedule: {"more": {"own": Own()}}, False),
        (False, lambda schedule: {}, False),
    ],
    ids=["none", "a GradScaler alone", "named", "in more", "another in more", "not scheduled"],
)
def test_one_that_no_checkpoint_holds_is_told_of_at_the_call(
    scheduled: bool, named: Callable[[Any], dict[str, Any]], warned: bool, tmp_path: Path
) -> None:
    """After a resume it was silently behind."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = lr_scheduler.StepLR(optimizer, 3) if scheduled else None
    loader = DataLoader(TensorDataset(torch.ones(4, 1)))
    checkpoint = Checkpointing(folder=tmp_path, **named(schedule))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accel.optimize(model, loader, optimizer, elastic=accel.Elastic(checkpoint=checkpoint), cache=False)
    told = [each for each in caught if "learning-rate scheduler" in str(each.message)]
    assert [each.filename for each in told] == [__file__] * warned
    assert not warned or "Checkpointing(folder=..., schedulers=[scheduler])" in str(told[0].message)
