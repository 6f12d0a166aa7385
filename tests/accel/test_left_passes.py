"""Passes that the loop leaves before their end: one begun for each step, or cut off by `break`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.profiler.phases import Measurement
from accel.session.measured_steps import ActionSteps
from tests.accel import loops
from tests.accel.loops import WAIT_S, Quick, advance, advance_until, loss_of, make, settled

pytestmark = pytest.mark.usefixtures("only_quick")
BETWEEN_S = 0.5
"""Between two passes, as an evaluation."""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, Measurement]]:
    """Return the steps that are measured, each with whether it is one without a wait."""
    steps: list[tuple[bool, Measurement]] = []
    add = ActionSteps.add

    def added(self: ActionSteps, step: Measurement, epochs: int, moves: int, *, are_repeated: bool) -> bool:
        before = len(self.result.measurements)
        has_ended = add(self, step, epochs, moves, are_repeated=are_repeated)
        if len(self.result.measurements) > before:
            steps.append((Quick.on, step))
        return has_ended

    monkeypatch.setattr(ActionSteps, "add", added)
    return steps


def training(model: nn.Module, loader: Any, optimizer: Any, most: int, between_s: float = 0.0) -> Iterator[list[int]]:
    """Train for ever, in passes of so many steps; without an optimizer by hand."""
    while True:
        for x, target in itertools.islice(iter(loader), most):
            loss_of(model(x), target).backward()
            if optimizer is not None:
                optimizer.step()
            for parameter in model.parameters():
                if optimizer is None:
                    parameter.data -= 0.01 * parameter.grad  # type: ignore[operator]
                parameter.grad = None
            yield target.tolist()
        if loops.clock is not None:
            loops.clock.sleep(between_s)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_pass_that_is_begun_for_each_step_is_a_part_of_it(
    measured: list[tuple[bool, Measurement]], by_hand: bool
) -> None:
    """It was measured from `iter` to the first request, 0.06 ms of 1.4, and no search ever began."""
    model, loader, optimizer = make()
    model, loader, *_ = accel.optimize(model, loader, *([] if by_hand else [optimizer]), budget=60)
    loop = training(model, loader, None if by_hand else optimizer, 1, between_s=WAIT_S)
    steps = advance_until(loop, settled(model))
    report = accel.explain(model)
    assert report.plan == {"quick": None}
    assert steps - 20 <= report.steps <= steps  # without an optimizer it begins once that is certain
    assert len(measured) > 10
    assert all(step.seconds >= (WAIT_S if quick else 2 * WAIT_S) for quick, step in measured)
    assert report.events == []
    accel.undo(model)


@pytest.mark.parametrize("most", [2, 5])
def test_what_comes_between_two_passes_is_no_step(measured: list[tuple[bool, Measurement]], most: int) -> None:
    """A step whose pass was left had lost its own time, and was measured as that of the next pass's beginning."""
    model, loader, optimizer = accel.optimize(*make(), budget=60)
    loop = training(model, loader, optimizer, most, between_s=BETWEEN_S)
    advance_until(loop, settled(model))
    assert accel.explain(model).plan == {"quick": None}
    advance(loop, 20)
    seconds = [step.seconds for quick, step in measured if not quick]
    assert len(seconds) > 10
    assert all(WAIT_S <= each < BETWEEN_S for each in seconds), seconds
    accel.undo(model)


def test_passes_that_are_left_make_their_samples_as_the_loader_does() -> None:
    model, loader, optimizer = make()
    torch.manual_seed(3)
    plain = advance(training(model, loader, optimizer, 1), 200)
    model, loader, optimizer = make()
    model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60)
    torch.manual_seed(3)
    assert advance(training(model, loader, optimizer, 1), 200) == plain
    accel.undo(model)
