"""Which ways the search tries and in what order, on played steps."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from typing import TypeVar

import pytest

from accel.comm.catalogue import Scheme
from accel.comm.cost_model.choice import Choice, Option, preferred
from accel.comm.selector import search
from accel.profiler.trial_driver import Block, Steps

T = TypeVar("T")

HALF, INT8, ONE_BIT, POWER = (Option(Scheme(name), 0.5, 0.0) for name in ("half", "int8", "1-bit", "powersgd 4"))
PLAIN = Option(None, 1.0, 0.0)


class Played:
    """A search with given step times: the first value is that of the first block, the second that of all others."""

    def __init__(self, options: list[Option], steps: dict[str, tuple[float, float]]) -> None:
        self.choice = Choice([*options, PLAIN], {PLAIN: 1.0})
        self.tried: list[str] = []
        self._steps = {scheme: iter_of(*values) for scheme, values in {"plain": (1.0, 1.0), **steps}.items()}

    def run(self, option: Option, block: Block) -> Generator[None, None, Steps]:
        yield
        self.tried.append(str(option))
        return Steps(seconds=[next(self._steps[str(option)])])

    def outcome(self) -> str:
        """Run the trials to their end."""
        return str(to_the_end(search(self.choice, 20, self.run)))


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


TURNS = "ABBAABBA"


def turns(first: str, second: str, pairs: int = 4) -> list[str]:
    return [first if arm == "A" else second for arm in TURNS[: 2 * pairs]]


def test_what_is_predicted_a_little_slower_than_the_best_was_is_tried_too() -> None:
    steps = {"1-bit": (0.50, 0.50), "powersgd 4": (0.45, 0.45)}
    played = Played([ONE_BIT, POWER._replace(step_s=0.54)], steps)
    assert played.outcome() == "powersgd 4"
    assert played.tried == turns("plain", "1-bit") + turns("1-bit", "powersgd 4")


def test_what_is_predicted_much_slower_is_not_tried() -> None:
    played = Played([ONE_BIT, POWER._replace(step_s=0.56)], {"1-bit": (0.50, 0.50)})
    assert played.outcome() == "1-bit"
    assert played.tried == turns("plain", "1-bit")


def test_a_disturbed_first_block_is_made_up_for() -> None:
    played = Played([ONE_BIT, POWER], {"1-bit": (0.47, 0.55), "powersgd 4": (0.45, 0.45)})
    assert played.outcome() == "powersgd 4"
    assert played.choice.measured[ONE_BIT] == pytest.approx(0.55)


def test_of_two_alike_the_one_nearer_to_exact_stays() -> None:
    played = Played([POWER, INT8], {"powersgd 4": (0.50, 0.50), "int8": (0.51, 0.51)})
    assert played.outcome() == "int8"
    played = Played([INT8, POWER], {"powersgd 4": (0.50, 0.50), "int8": (0.51, 0.51)})
    assert played.outcome() == "int8"
    assert preferred({POWER: 0.50, INT8: 0.52}) == POWER


def test_nothing_worthwhile_leaves_ddps_own() -> None:
    played = Played([HALF._replace(step_s=0.99)], {})
    assert (played.outcome(), played.tried) == ("plain", [])


@pytest.mark.parametrize(
    ("step_s", "kept", "pairs"), [(1.2, False, 3), (0.995, False, 3), (0.9, True, 4), (0.5, True, 4)]
)
def test_a_scheme_stays_by_a_gain_that_a_trial_has_shown(step_s: float, kept: bool, pairs: int) -> None:
    played = Played([HALF], {"half": (step_s, step_s)})
    assert played.outcome() == ("half" if kept else "plain")
    assert played.tried == turns("plain", "half", pairs)
    assert played.choice.plain_s == pytest.approx(1.0)


def test_a_gain_that_no_trial_has_shown_is_not_kept() -> None:
    played = Played([HALF], {})
    played._steps["half"] = itertools.cycle((0.5, 1.5))  # 15 % faster, if these were all
    assert played.outcome() == "plain"
