"""What an earlier run has shown and what this one shows, pooled: noise undoes little, and what is slower goes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.profiler.trial import Outcome
from accel.search.remembered import RememberedSearch, RememberedTrial
from accel.search.trials import bears_out, pooled
from tests.accel.memory import FakeMemory, day, remembered
from tests.accel.simulation import Machine, candidate, simulate

pytestmark = pytest.mark.usefixtures("today")
OUTCOME = Outcome(
    verdict="refused", gain=1.05, low=0.95, high=1.16, before_ms=10.0, after_ms=9.5, spread_ms=0.1, pairs=10
)
OPEN = ", by what was shown then, since noise leaves it open in this run"
GAINS = st.floats(0.2, 5.0)


def kept(gain: float, noise: float) -> int:
    """In how many of 30 runs a plan, of 1.1 in an earlier run, stays."""
    found = 0
    for seed in range(30):
        trials = {"good": RememberedTrial(status="kept", on=day(3), gain=1.1, low=1.06)}
        memory = FakeMemory(remembered(plan={"good": None}, speedup=1.1, speedup_low=1.06, trials=trials))
        controller = simulate([candidate("good")], Machine(speed={"good": gain}, noise=noise, seed=seed), memory=memory)
        found += "good" in controller.plan
    return found


def test_noise_does_not_undo_a_plan_and_what_has_become_slower_goes() -> None:
    assert kept(1.1, noise=0.2) >= 24  # by this run alone: twelve
    assert kept(1.1, noise=0.05) == 30
    assert kept(1.0, noise=0.1) <= 1
    assert kept(0.95, noise=0.2) <= 1


def test_what_was_shown_is_pooled_over_runs() -> None:
    memory = FakeMemory()
    simulate([candidate("good")], Machine(speed={"good": 1.1}, noise=0.02), memory=memory)
    for seed in range(3):
        assert memory.search is not None
        assert memory.search.speedup is not None and memory.search.speedup_low is not None
        before = memory.search.speedup / memory.search.speedup_low
        controller = simulate([candidate("good")], Machine(speed={"good": 1.1}, noise=0.3, seed=seed), memory=memory)
        assert controller.closing is not None
        by_itself = controller.closing.verdict == "keep"
        assert controller.recollection.text.endswith(f"checked again: kept{'' if by_itself else OPEN}")
        assert memory.search.speedup == pytest.approx(1.1, rel=0.01)
        assert memory.search.speedup / memory.search.speedup_low <= before  # each noisy run adds a little


@given(gain=GAINS, low=GAINS, now=GAINS, width=st.floats(1.0, 3.0))
def test_both_must_point_one_way(gain: float, low: float, now: float, width: float) -> None:
    outcome = replace(OUTCOME, gain=now, low=now / width, high=now * width)
    if bears_out(outcome, gain, low):
        assert 1.0 < low <= gain
        assert now >= 1.0
        assert outcome.high >= low


@given(gain=st.floats(1.001, 5.0), error=st.floats(1.0001, 2.0), now=GAINS, width=st.floats(1.001, 3.0))
def test_the_pooled_gain_lies_between_both_and_is_known_better(
    gain: float, error: float, now: float, width: float
) -> None:
    both = pooled(replace(OUTCOME, gain=now, low=now / width, high=now * width), gain, gain / error)
    if both is None:
        assert gain / error <= 1.0 or now * width < gain / error or now / width > gain * error
        return
    mean, low = both
    assert min(gain, now) * 0.999 <= mean <= max(gain, now) * 1.001
    assert mean / low <= min(max(error, 1.001), width) * 1.0001


@given(gain=st.floats(1.02, 3.0), noise=st.floats(1.001, 2.0))
def test_the_same_once_more_is_borne_out(gain: float, noise: float) -> None:
    low = math.exp(math.log(gain) / 2)
    assert bears_out(replace(OUTCOME, gain=gain, low=gain / noise, high=gain * noise), gain, low)


@pytest.mark.parametrize(
    ("gain", "low", "high"),
    [(1.02, 0.99, 1.05), (0.98, 0.7, 1.4), (1.3, 0.0, math.inf)],
    ids=["less than then", "a loss", "nothing known"],
)
def test_what_is_not_borne_out(gain: float, low: float, high: float) -> None:
    assert not bears_out(replace(OUTCOME, gain=gain, low=low, high=high), 1.1, 1.06)


def test_a_gain_without_its_interval_counts_for_nothing() -> None:
    memory = FakeMemory(remembered(plan={"good": None}, speedup=1.1))
    controller = simulate([candidate("good")], Machine(speed={"good": 1.0}, noise=0.2, seed=3), memory=memory)
    assert "good" not in controller.plan


# -- a plan of which a part waits --------------------------------------------------------------------------------------


def part_of(earlier: RememberedSearch, seed: int) -> tuple[bool, RememberedSearch]:
    """Run with too little time to compile; tell whether the rest of the plan stayed, and what is remembered then."""
    memory = FakeMemory(earlier)
    offered = [candidate("x"), candidate("compile", one_off_s=30.0)]
    controller = simulate(offered, Machine(speed={"x": 1.1}, noise=0.2, seed=seed), memory=memory, budget="1s")
    controller.remember(ended=True)
    assert memory.search is not None
    return "checked again: kept" in controller.recollection.text, memory.search


def test_noise_does_not_undo_a_part_of_a_plan_whose_rest_waits() -> None:
    trials = {"x": RememberedTrial(status="kept", on=day(3), gain=1.1, low=1.06)}
    earlier = remembered(plan={"x": None, "compile": None}, speedup=1.6, speedup_low=1.5, trials=trials)
    stayed = 0
    for seed in range(20):
        kept_part, after = part_of(earlier, seed)
        stayed += kept_part
        if kept_part:  # what is known of the whole plan is not replaced by what a part of it gave
            assert after.plan == earlier.plan
            assert (after.speedup, after.speedup_low, after.speedup_of) == (1.6, 1.5, None)
    assert stayed >= 16


def test_the_speedup_of_a_part_is_remembered_as_that() -> None:
    memory = FakeMemory(remembered(plan={"x": None, "compile": None}))
    offered = [candidate("x"), candidate("compile", one_off_s=30.0)]
    for _ in range(2):
        controller = simulate(offered, Machine(speed={"x": 1.1}, noise=0.02), memory=memory, budget="1s")
        assert controller.plan == {"x": None}
        assert memory.search is not None
        assert memory.search.speedup == pytest.approx(1.1, rel=0.02)
        assert memory.search.speedup_of == ["x"]
    assert "x then" not in controller.recollection.text
    assert memory.search is not None and memory.search.saved_s == 0.0


def test_a_single_strategy_of_a_plan_of_which_nothing_else_is_known_is_not_pooled() -> None:
    memory = FakeMemory(remembered(plan={"x": None, "compile": None}, speedup=1.6, speedup_low=1.5))
    machine = Machine(speed={"x": 1.0}, noise=0.2, seed=3)
    offered = [candidate("x"), candidate("compile", one_off_s=30.0)]
    assert simulate(offered, machine, memory=memory, budget="1s").plan == {}
