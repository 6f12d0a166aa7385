"""ProgressSchedule: a schedule of T steps takes T steps' worth of progress."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from accel.elastic.learning_rate import LearningRateScaler
from accel.elastic.progress import ProgressSchedule
from accel.elastic.scaling_rules import BatchScale, NoScaling
from accel.errors import InvalidArgument


def setup(kind: str, **options: float) -> tuple[torch.optim.Optimizer, LearningRateScaler, ProgressSchedule]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0, momentum=0.9)
    scaler = LearningRateScaler(optimizer, NoScaling())
    return optimizer, scaler, ProgressSchedule(getattr(lr_scheduler, kind)(optimizer, **options), scaler)


SCHEDULES = [
    ("StepLR", {"step_size": 4, "gamma": 0.5}),
    ("CosineAnnealingLR", {"T_max": 30}),
    ("LinearLR", {"total_iters": 10}),
    ("OneCycleLR", {"max_lr": 2.0, "total_steps": 25}),
]


@pytest.mark.parametrize(("kind", "options"), SCHEDULES)
@given(gains=st.lists(st.floats(1, 6), max_size=12))
def test_rate_is_that_of_a_plain_loop_after_as_many_steps_as_progress_says(
    kind: str, options: dict[str, float], gains: list[float]
) -> None:
    optimizer, scaler, schedule = setup(kind, **options)
    for gain in gains:
        scaler.update(BatchScale(64 * 6, 64, gain=gain))
        optimizer.step()
        schedule.step()
    assert scaler.progress == pytest.approx(sum(gains))
    plain, _, theirs = setup(kind, **options)
    plain.step()
    for _ in range(min(int(sum(gains) + 1e-6), options.get("total_steps", 10**9))):  # type: ignore[call-overload]
        theirs.scheduler.step()
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert optimizer.param_groups[0]["momentum"] == plain.param_groups[0]["momentum"]


def test_scale_one_steps_once_per_step() -> None:
    optimizer, _, schedule = setup("ExponentialLR", gamma=0.5)
    for step in range(1, 6):
        optimizer.step()
        schedule.step()
        assert schedule.scheduler.last_epoch == step


def test_rounding_of_the_sum_costs_no_step() -> None:
    optimizer, scaler, schedule = setup("ExponentialLR", gamma=0.5)
    scaler.update(BatchScale(128, 64, gain=1.1))
    for _ in range(10):
        optimizer.step()
        schedule.step()
    assert schedule.scheduler.last_epoch == 11


def test_begins_where_the_scaler_is_and_goes_on_from_a_state() -> None:
    optimizer, scaler, _ = setup("ExponentialLR", gamma=0.5)
    scaler.update(BatchScale(256, 64, gain=2.5))
    optimizer.step()
    schedule = ProgressSchedule(lr_scheduler.ExponentialLR(optimizer, gamma=0.5), scaler)
    optimizer.step()  # 2.5 → 5: calls for 3, 4 and 5
    schedule.step()
    assert schedule.scheduler.last_epoch == 3
    other_optimizer, other_scaler, other = setup("ExponentialLR", gamma=0.5)
    other_scaler.load_state_dict(scaler.state_dict())
    other_optimizer.load_state_dict(optimizer.state_dict())
    other.load_state_dict(schedule.state_dict())
    for each, its in ((optimizer, schedule), (other_optimizer, other)):
        each.step()
        its.step()
    assert other.state_dict() == schedule.state_dict()
    assert schedule.scheduler.last_epoch == 5  # 7.5
    assert optimizer.param_groups[0]["lr"] == other_optimizer.param_groups[0]["lr"]


def test_plateau_is_refused() -> None:
    optimizer, scaler, _ = setup("ExponentialLR", gamma=0.5)
    with pytest.raises(InvalidArgument, match=r"must be one by steps, got ReduceLROnPlateau; call its step\(metric\)"):
        ProgressSchedule(lr_scheduler.ReduceLROnPlateau(optimizer), scaler)  # type: ignore[arg-type]
