"""Which ways the search tries and in what order, on played steps."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TypeVar

import pytest

from accel.comm.catalogue import Scheme
from accel.comm.cost_model.choice import Option, preferred
from accel.comm.engine.gradient_engine import GradientEngine
from accel.comm.selection.planner import Planner
from accel.comm.selection.search import PlanSearch
from accel.comm.selector import Choice

T = TypeVar("T")

HALF, INT8, ONE_BIT, POWER = (Option(Scheme(name), 0.5, 0.0) for name in ("half", "int8", "1-bit", "powersgd 4"))
PLAIN = Option(None, 1.0, 0.0)


class Played(PlanSearch):
    """A search with given step times: the first value is that of the first trial, the second that of all others."""

    def __init__(self, options: list[Option], steps: dict[str, tuple[float, float]]) -> None:
        choice = Choice([*options, PLAIN], {PLAIN: 1.0})
        planner = Planner.__new__(Planner)
        GradientEngine.__init__(planner)
        super().__init__(planner, choice, check=20)
        self.tried: list[str] = []
        self._steps = {scheme: iter_of(*values) for scheme, values in {"plain": (1.0, 1.0), **steps}.items()}

    def measured(self, option: Option, steps: int) -> Generator[None, None, float]:
        yield
        self.tried.append(str(option))
        self.choice.measured[option] = next(self._steps[str(option)])
        return self.choice.measured[option]

    def outcome(self) -> str:
        """Run the trials to their end."""
        return str(to_the_end(self.best()))


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
    steps = {"1-bit": (0.50, 0.50), "powersgd 4": (0.45, 0.45)}
    played = Played([ONE_BIT, POWER._replace(step_s=0.54)], steps)
    assert played.outcome() == "powersgd 4"
    assert played.tried[:2] == ["1-bit", "powersgd 4"]


def test_what_is_predicted_much_slower_is_not_tried() -> None:
    played = Played([ONE_BIT, POWER._replace(step_s=0.56)], {"1-bit": (0.50, 0.50)})
    assert played.outcome() == "1-bit"
    assert played.tried == ["1-bit"]


def test_two_near_to_each_other_are_on_trial_and_a_disturbed_first_measurement_is_forgotten() -> None:
    played = Played([ONE_BIT, POWER], {"1-bit": (0.47, 0.55), "powersgd 4": (0.50, 0.50)})
    assert played.outcome() == "powersgd 4"
    assert played.tried == ["1-bit", "powersgd 4", *["1-bit", "powersgd 4", "powersgd 4", "1-bit"] * 2]
    assert played.choice.measured[ONE_BIT] == pytest.approx(0.55)


def test_two_far_from_each_other_do_not() -> None:
    played = Played([ONE_BIT, POWER], {"1-bit": (0.50, 9.0), "powersgd 4": (0.56, 9.0)})
    assert played.outcome() == "1-bit"
    assert played.tried == ["1-bit", "powersgd 4"]


def test_of_two_alike_the_one_nearer_to_exact_stays() -> None:
    played = Played([POWER, INT8], {"powersgd 4": (0.50, 0.50), "int8": (0.51, 0.51)})
    assert played.outcome() == "int8"
    assert preferred({POWER: 0.50, INT8: 0.52}) == POWER


def test_nothing_worthwhile_leaves_ddps_own() -> None:
    assert Played([HALF._replace(step_s=0.99)], {}).outcome() == "plain"


@pytest.mark.parametrize(
    ("step_s", "pays", "pairs"), [(1.2, False, 0), (0.99, False, 0), (0.9, True, 4), (0.975, False, 3), (0.5, True, 0)]
)
def test_a_scheme_pays_by_a_large_gain_or_a_small_one_that_a_trial_has_shown(
    step_s: float, pays: bool, pairs: int
) -> None:
    later_s = 0.995 if step_s == 0.975 else step_s
    played = Played([HALF], {"half": (later_s, later_s)})
    played.choice.measured[HALF] = step_s
    assert to_the_end(played.pays(HALF)) == pays
    assert played.tried == ["plain", "half", "half", "plain", "plain", "half", "half", "plain"][: 2 * pairs]
    assert played.choice.plain_s == pytest.approx(1.0)
