"""Which ways the search tries and in what order, on played steps."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TypeVar

import pytest

from accel.comm.catalogue import Scheme
from accel.comm.cost_model.choice import Option, preferred
from accel.comm.cost_model.cost import Network, Profile
from accel.comm.engine.gradient_engine import GradientEngine
from accel.comm.engine.plan import Plan
from accel.comm.selection.planner import Planner
from accel.comm.selection.search import PlanSearch
from accel.comm.selector import Choice

T = TypeVar("T")

PLAIN: Plan = (None, None)
HALF, INT8, ONE_BIT, POWER = (
    (Scheme(name, hierarchical=False),) * 2 for name in ("half", "int8", "1-bit", "powersgd 4")
)


class Played(PlanSearch):
    """A search with given step times: the first value is that of the first trial, the second that of all others."""

    def __init__(self, predicted: dict[Plan, float], steps: dict[Plan, tuple[float, float]]) -> None:
        options = [Option(plan, step_s, 0.0) for plan, step_s in predicted.items()]
        profile, network = Profile((1, 1), (0.0, 1.0), 0.0), Network.__new__(Network)
        choice = Choice(options, profile, network, predicted[PLAIN], {}, {PLAIN: predicted[PLAIN]})
        planner = Planner.__new__(Planner)
        planner.engine = GradientEngine()
        super().__init__(planner, choice, check=20)
        self.tried: list[Plan] = []
        self._steps = {plan: iter_of(*values) for plan, values in steps.items()}

    def measured(self, plan: Plan, steps: int, settle: int = 1) -> Generator[None, None, float]:
        yield
        self.tried.append(plan)
        self.choice.measured[plan] = next(self._steps[plan])
        return self.choice.measured[plan]

    def outcome(self) -> Plan:
        """Run the trials to their end."""
        return to_the_end(self.shortest())


def to_the_end(steps: Generator[None, None, T]) -> T:
    """Take steps until the search returns."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            return ended.value  # type: ignore[no-any-return]


def iter_of(first: float, rest: float) -> Iterator[float]:
    """Return the first value, then the other for ever."""
    yield first
    while True:
        yield rest


def test_what_is_predicted_a_little_slower_than_the_best_was_is_tried_too() -> None:
    played = Played({ONE_BIT: 0.50, POWER: 0.54, PLAIN: 1.0}, {ONE_BIT: (0.50, 0.50), POWER: (0.45, 0.45)})
    assert played.outcome() == POWER
    assert played.tried[:2] == [ONE_BIT, POWER]


def test_what_is_predicted_much_slower_is_not_tried() -> None:
    played = Played({ONE_BIT: 0.50, POWER: 0.56, PLAIN: 1.0}, {ONE_BIT: (0.50, 0.50)})
    assert played.outcome() == ONE_BIT
    assert played.tried == [ONE_BIT]


def test_two_near_to_each_other_are_on_trial_and_a_disturbed_first_measurement_is_forgotten() -> None:
    played = Played({ONE_BIT: 0.50, POWER: 0.50, PLAIN: 1.0}, {ONE_BIT: (0.47, 0.55), POWER: (0.50, 0.50)})
    assert played.outcome() == POWER
    assert played.tried == [ONE_BIT, POWER, *[ONE_BIT, POWER, POWER, ONE_BIT] * 2]
    assert played.choice.measured[ONE_BIT] == pytest.approx(0.55)


def test_two_far_from_each_other_do_not() -> None:
    played = Played({ONE_BIT: 0.50, POWER: 0.50, PLAIN: 1.0}, {ONE_BIT: (0.50, 9.0), POWER: (0.56, 9.0)})
    assert played.outcome() == ONE_BIT
    assert played.tried == [ONE_BIT, POWER]


def test_of_two_alike_the_one_nearer_to_exact_stays() -> None:
    played = Played({POWER: 0.50, INT8: 0.50, PLAIN: 1.0}, {POWER: (0.50, 0.50), INT8: (0.51, 0.51)})
    assert played.outcome() == INT8
    assert preferred((POWER, INT8), {POWER: 0.50, INT8: 0.52}) == POWER


def test_nothing_worthwhile_leaves_ddps_own() -> None:
    assert Played({PLAIN: 1.0, HALF: 0.99}, {}).outcome() == ()


@pytest.mark.parametrize(("step_s", "proves", "pairs"), [(0.9, True, 4), (0.99, False, 3), (1.1, False, 3)])
def test_a_small_gain_must_show_in_a_trial_against_ddps_own(step_s: float, proves: bool, pairs: int) -> None:
    played = Played({HALF: 0.9, PLAIN: 1.0}, {HALF: (step_s, step_s), PLAIN: (1.0, 1.0)})
    assert to_the_end(played.proves(HALF)) == proves
    assert played.tried == [PLAIN, HALF, HALF, PLAIN, PLAIN, HALF, HALF, PLAIN][: 2 * pairs]
    assert played.choice.plain_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("step_s", "pays", "on_trial"), [(1.2, False, False), (0.99, False, False), (0.9, True, True), (0.5, True, False)]
)
def test_a_scheme_pays_by_a_large_gain_or_a_small_one_that_a_trial_has_shown(
    step_s: float, pays: bool, on_trial: bool
) -> None:
    played = Played({HALF: 0.5, PLAIN: 1.0}, {HALF: (step_s, step_s), PLAIN: (1.0, 1.0)})
    played.choice.measured[HALF] = step_s
    assert to_the_end(played.pays(HALF)) == pays
    assert bool(played.tried) == on_trial
