"""What noise leaves open in one trial may be settled by two: of the same run, or of this one and the one before."""

from __future__ import annotations

from typing import Any

import pytest

from accel.profiler.trial import Outcome
from accel.search.controller import Controller
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


def closed(machine: Machine) -> Controller:
    return simulate([candidate("good"), candidate("fine")], machine)


def test_a_plan_that_noise_leaves_open_stays_if_its_trials_have_shown_a_gain() -> None:
    found = 0
    for seed in range(40):
        controller = closed(Machine(speed={"good": 1.07, "fine": 1.07}, noise=0.2, seed=seed))
        if controller.closing is not None and controller.closing.verdict == "refused":
            assert controller.plan and controller.closing.gain >= 1.0
            found += 1
    assert found


def test_a_plan_that_is_slower_as_a_whole_goes_whatever_its_trials_have_shown() -> None:
    class Together(Machine):
        """What helps alone loses with the other, once both have had their trials."""

        def seconds(self, plan: dict[str, Any]) -> float:
            spoilt = len(plan) == 2 and self.closes
            return super().seconds({} if spoilt else plan) * (1.04 if spoilt else 1.0)

        @property
        def closes(self) -> bool:
            return any(not action.plan for action in self.actions[-3:]) and len(self.actions) > 20

    for seed in range(10):
        controller = closed(Together(speed={"good": 1.2, "fine": 1.2}, noise=0.02, seed=seed))
        assert len(controller.plan) < 2
