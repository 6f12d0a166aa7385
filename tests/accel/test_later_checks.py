"""The guard's later checks of a finished plan: one batch of bad luck undoes nothing, wrong numbers everything."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from accel.guard.guard import Comparison
from accel.search.actions import Action, Result
from accel.search.state import SearchState
from tests.accel.simulation import FAST, Machine, candidate, simulate

PROBLEM = "its gradients are 1.025 times as long, allowed 1 ± 1.6e-02"


class Fails(Machine):
    """The first so many later checks fail."""

    failures = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.checks: list[int] = []

    def answer(self, action: Action) -> Result:
        result = super().answer(action)
        if action.check is not None and action.after_search:
            self.checks.append(self.step)
            if len(self.checks) <= self.failures:
                result.finding = Comparison(PROBLEM, 0.0)
        return result


def run(failures: int, machine: Machine | None = None) -> tuple[SearchState, list[int]]:
    machine = machine or Fails(speed={"good": 1.5})
    assert isinstance(machine, Fails)
    machine.failures = failures
    controller = simulate([candidate("good")], machine, pace=FAST, until_settled=False, steps=1500)
    return controller, machine.checks


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_plan_stays_whose_check_passes_with_one_of_the_next_batches(failures: int) -> None:
    controller, checks = run(failures)
    assert controller.plan == {"good": None} and controller.rows["good"].status == "kept"
    again = [b - a for a, b in itertools.pairwise(checks)]
    assert again[:failures] == failures * [1]
    assert all(gap > 100 for gap in again[failures:])  # then as ever: at ever larger gaps


def test_a_plan_whose_check_fails_with_each_batch_is_undone() -> None:
    controller, checks = run(10)
    assert controller.plan == {}
    assert controller.rows["good"].status == "undone"
    assert controller.rows["good"].why == f"the guard's later check failed: {PROBLEM}"
    assert checks[2] - checks[0] == 2 and len(checks) == 3


def test_another_regime_ends_the_checks() -> None:
    changes = Fails(speed={"good": 1.5})
    changes.regime = lambda step: "other" if len(changes.checks) >= 2 else "shape"
    controller, checks = run(2, changes)
    assert "searching again" in " ".join(event.text for event in controller.events)
    assert checks[1] - checks[0] == 1


def test_none_are_repeated_where_the_pace_says_so() -> None:
    machine = Fails(speed={"good": 1.5})
    machine.failures = 1
    hasty = replace(FAST, confirm=0)
    controller = simulate([candidate("good")], machine, pace=hasty, until_settled=False, steps=1500)
    assert controller.plan == {}


def test_a_closing_trial_is_shown_for_its_own_plan_only() -> None:
    """A strategy of it was undone: the report gave the larger plan's speed-up until the next one."""
    controller = simulate([candidate("good"), candidate("better")], Machine(speed={"good": 1.3, "better": 1.6}))
    assert controller.closed is controller.closing is not None
    assert controller.break_even_step() is not None
    del controller.plan["good"]
    assert controller.closed is None
    assert controller.break_even_step() is None
