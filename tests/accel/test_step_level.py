"""When a finished plan is tried again: three looks in a row that are slower than the usual step."""

from __future__ import annotations

import pytest

from accel.search.controller import StepLevel


def looked(*medians_ms: float) -> tuple[StepLevel, list[str]]:
    level = StepLevel(slower=1.1)
    return level, [level.add(median_ms) for median_ms in medians_ms]


def test_three_slower_looks_in_a_row_are_said_with_the_fastest_of_them() -> None:
    _, said = looked(10.0, 10.2, 9.8, 12.0, 11.5, 13.0)
    assert said == ["", "", "", "", "", "the step became slower (10 → 11.5 ms)"]


@pytest.mark.parametrize("last", [(12.0, 10.0, 12.0), (10.9, 10.9, 10.9)], ids=["not in a row", "hardly slower"])
def test_other_looks_are_let_pass(last: tuple[float, ...]) -> None:
    assert not any(looked(10.0, 10.0, 10.0, *last)[1])


def test_it_is_open_until_the_usual_step_is_known_and_after_a_slow_look() -> None:
    assert looked(10.0, 10.0)[0].is_open
    assert not looked(10.0, 10.0, 10.0)[0].is_open
    assert looked(10.0, 10.0, 10.0, 12.0)[0].is_open
    assert not looked(10.0, 10.0, 10.0, 12.0, 10.0)[0].is_open


def test_begun_again_it_takes_three_looks_again() -> None:
    level, _ = looked(10.0, 10.0, 10.0, 12.0, 12.0)
    level.begin_again()
    assert [level.add(20.0) for _ in range(3)] == ["", "", ""]
    assert not level.is_open
