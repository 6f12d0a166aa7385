"""Shares add up, and stalls and starts of epochs are told from what each step has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.profiler.diagnose.anatomy import of, typical
from accel.profiler.phases import PHASES, Measurement


def step(number: int = 0, *, first: bool = False, **phases: float) -> Measurement:
    held = dict.fromkeys(PHASES, 0.0) | phases
    return Measurement(step=number, seconds=sum(held.values()), phases=held, first=first)


@given(
    st.lists(
        st.builds(
            lambda values, first: step(first=first, **dict(zip(PHASES, values, strict=True))),
            st.lists(st.floats(0, 10), min_size=len(PHASES), max_size=len(PHASES)),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_shares_add_up_and_parts_stay_within(steps: list[Measurement]) -> None:
    found = of(steps)

    total = sum(m.seconds for m in steps)
    assert sum(found.shares.values()) == pytest.approx(1.0 if total > 0 else 0.0)
    assert -1e-9 <= found.epoch_start <= found.shares["data"] + 1e-9
    around = found.shares["outside"] + found.shares["evaluation"]
    assert found.each + found.stalls == pytest.approx(around, abs=1e-9)


def test_stalls_are_told_from_what_each_step_has() -> None:
    steps = [step(n, forward=8.0, outside=42.0 if n % 20 == 10 else 2.0) for n in range(100)]

    found = of(steps)

    assert found.each == pytest.approx(200 / 1200)
    assert found.stalls == pytest.approx(200 / 1200)
    assert found.stall_every == 20


def test_the_start_of_epochs_is_what_first_steps_wait_longer() -> None:
    steps = [step(n, first=n % 10 == 0, data=51.0 if n % 10 == 0 else 1.0, forward=9.0) for n in range(50)]

    assert of(steps).epoch_start == pytest.approx(250 / 750)


def test_an_epoch_of_one_batch_has_no_start_beside_its_ordinary_wait() -> None:
    found = of([step(n, first=True, data=5.0, forward=5.0) for n in range(30)])

    assert (found.epoch_start, found.epoch_slow) == (0.0, 0.0)
    assert found.shares["data"] == pytest.approx(0.5)


def test_no_steps() -> None:
    assert of([]).steps == 0
    assert typical([]) == {}


def test_the_typical_step_adds_up_to_the_median() -> None:
    steps = [step(n, data=1.0, forward=2.0, backward=3.0) for n in range(4)] + [step(4, data=500.0)]

    assert sum(typical(steps).values()) == pytest.approx(6.0)
