"""What noise leaves open in one trial may be settled by two: of the same run, or of this one and the one before."""

from __future__ import annotations

import pytest

from accel.profiler.trial import Outcome
from accel.search.trials import shows_a_gain
from tests.accel.memory import FakeMemory
from tests.accel.simulation import Machine, candidate, simulate

pytestmark = pytest.mark.usefixtures("today")


def outcome(gain: float, low: float, high: float) -> Outcome:
    return Outcome(
        verdict="refused",
        gain=gain,
        low=low,
        high=high,
        before_ms=10.0,
        after_ms=10.0 / gain,
        spread_ms=0.1,
        pairs=36,
    )


@pytest.mark.parametrize(
    ("this", "earlier", "shows"),
    [
        ((1.05, 1.008, 1.09), (1.05, 1.007), True),
        ((1.05, 0.999, 1.10), (1.05, 1.007), False),  # each must show something by itself
        ((1.05, 1.008, 1.09), (1.03, 0.99), False),
        ((1.02, 1.001, 1.04), (1.02, 1.001), False),  # too little together
        ((1.05, 1.04, 1.06), (1.30, 1.25), False),  # not of one effect
    ],
)
def test_two_trials_that_are_open(this: tuple[float, float, float], earlier: tuple[float, float], shows: bool) -> None:
    assert shows_a_gain(outcome(*this), *earlier, at_least=0.005) is shows


def kept_in(gain: float, noise: float, seeds: int) -> tuple[int, int]:
    """Return in how many first and second runs of so many a strategy is kept."""
    first = second = 0
    for seed in range(seeds):
        memory = FakeMemory()
        machine = Machine(speed={"good": gain}, noise=noise, seed=seed)
        first += "good" in simulate([candidate("good")], machine, memory=memory).plan
        machine = Machine(speed={"good": gain}, noise=noise, seed=seed + 1000)
        second += "good" in simulate([candidate("good")], machine, memory=memory).plan
    return first, second


def test_a_small_gain_in_noise_is_kept_more_often_in_the_second_run() -> None:
    first, second = kept_in(1.06, noise=0.25, seeds=60)
    assert second > first


def test_nothing_is_kept_of_what_gives_nothing() -> None:
    first, second = kept_in(1.0, noise=0.25, seeds=60)
    assert first + second <= 2
