"""Ranks that don't come to the place where all decide: a sentence within seconds, and plain training on every rank."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from accel.run.ranks import Ranks
from tests.accel import rank_cases as cases
from tests.comm.ranks import run_ranks
from tests.conftest import Once

SLOW = pytest.mark.slow

# Two runs of 40 to 80 steps of some ms, on a machine with other work, beside one wait.
MOST_S = cases.PATIENCE_S + 30
"""On a busy machine; gloo itself gives up after 40 s."""

CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    # A rank alone comes first: the others have made one session less from then on.
    "rank 0 alone": (cases.alone, (0,)),
    "rank 1 alone": (cases.alone, (1,)),
    "much later": (cases.much_later, ()),
    "uneven": (cases.joined, ([20, 21],)),
    "very uneven": (cases.joined, ([3, 40],)),
    "checked alone": (cases.joined, ([13, 16],)),  # the guard replays steps 14 and 15, which rank 0 has not
    "even": (cases.joined, ([60, 60],)),
    "late at once": (cases.late, (0, 0)),
    "late in a trial": (cases.late, (0, 12)),
    "raise": (cases.leaves, ("raise",)),
    "undo": (cases.leaves, ("undo",)),
    "fail": (cases.leaves, ("fail",)),
    "fail with hooks on": (cases.keeps, ()),
    "halfway": (cases.halfway, ()),
    "prepared": (cases.prepared, ()),
    "rank 0 fails": (cases.deciding_fails, ()),
    "even again": (cases.joined, ([20, 20],)),
}


WAITING = ("rank 1 alone", "much later", "very uneven", "late at once")
"""Left to slow runs, in a launch of their own: who waits for whom in others too."""

Everyone = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def everyone(once: Once) -> Everyone:
    """Return what each rank found in a case."""

    def of_each_rank(name: str) -> list[dict[str, Any]]:
        names = [one for one in CASES if (one in WAITING) == (name in WAITING)]
        cases_of = [CASES[one] for one in names]
        ranks = once(f"ranks, {names[0]}", lambda: run_ranks(cases.one_after_the_other, 2, cases_of, timeout_s=200))
        return [rank[names.index(name)] for rank in ranks]

    return of_each_rank


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW if name in WAITING else []) for name in CASES])
def test_the_loop_and_its_collectives_are_as_they_were_within_seconds(everyone: Everyone, name: str) -> None:
    for one in everyone(name):
        assert one.get("same", True)
        assert one["own collective"] == [0, 1]
        assert one["seconds"] < MOST_S
        assert all("\n" not in told for told in one["told"])


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("uneven", None),
        ("rank 0 alone", "rank 0 waits for rank 1"),
        ("raise", "rank 0 waits for rank 1"),
        pytest.param("very uneven", None, marks=SLOW),
        pytest.param("much later", None, marks=SLOW),
        pytest.param("late at once", "rank 0 waits for rank 1", marks=SLOW),
        pytest.param("rank 1 alone", "rank 1 waits for rank 0", marks=SLOW),
    ],
)
def test_who_was_missing_what_for_and_what_to_do(everyone: Everyone, name: str, waits: str | None) -> None:
    for one in everyone(name):
        for told in one["told"]:
            assert told.startswith(f"accel stopped and left the loop as it was: {waits or 'rank'}")
            assert ", which did not come to the end of step " in told
            assert f" within {cases.PATIENCE_S:g} s; every rank must call accel.optimize and take as many steps" in told
        assert not one.get("alive")
        assert not one.get("on")
    said = [len(one["told"]) for one in everyone(name)]
    # By the rank that waited, for all. Of calls at different times each is waited for on its own.
    assert sum(said) == (2 if name == "much later" else 1)
    assert waits is None or said[int(waits[5])] == 1


def test_a_rank_that_is_late_in_a_trial_stops_where_the_others_do(everyone: Everyone) -> None:
    """Whether that is a step at which they meet or not."""
    one, other = everyone("late in a trial")
    assert other["told"] == []
    assert one["alive"] == other["alive"] == (not one["told"])


@pytest.mark.parametrize("name", ["even", "even again"])
def test_ranks_that_meet_are_accelerated_whatever_went_before(everyone: Everyone, name: str) -> None:
    for one in everyone(name):
        assert one["told"] == []
        assert one["alive"]


@pytest.mark.parametrize(
    ("name", "why", "said"),
    [
        ("undo", "rank 1 has left: accel was undone there", [1, 0]),
        ("fail", "rank 1 has left: ZeroDivisionError: division by zero", [1, 1]),
        ("rank 0 fails", "rank 0 failed to answer the others: OSError: no room left", [1, 0]),
    ],
)
def test_a_rank_that_says_so_is_not_waited_for(everyone: Everyone, name: str, why: str, said: list[int]) -> None:
    found = everyone(name)
    assert found[0]["told"] == [f"accel stopped and left the loop as it was: {why}"]
    assert [len(one["told"]) for one in found] == said
    assert found[0]["seconds"] < MOST_S - cases.PATIENCE_S


def test_what_all_must_switch_at_one_step_stays_on_where_one_rank_fails_alone(
    everyone: Everyone,
) -> None:
    for one in everyone("fail with hooks on"):
        assert one["met one"]
        assert not one["alive"]
        assert one["on"]
        assert not one["on after undo"]
        assert len(one["told"]) == 1


def test_what_all_must_switch_at_one_step_takes_no_step_where_one_rank_could_not(
    everyone: Everyone,
) -> None:
    for one in everyone("halfway"):
        assert not one["ever on"]
        assert one["told"] == []
    status, why = everyone("halfway")[0]["rows"]["halfway"]
    assert status == "undone"
    assert "no such device on this rank" in why


@pytest.mark.parametrize(("step_s", "patience_s"), [(0.0, 10.0), (4.9, 10.0), (10.2, 21.0), (3600.0, 60.0)])
def test_patience_is_ten_seconds_or_twice_a_step_and_a_minute_at_most(step_s: float, patience_s: float) -> None:
    ranks, said = Ranks(), []
    ranks._meeting = SimpleNamespace(meet=lambda *given: said.append(ranks._meeting.patience_s))  # type: ignore
    ranks.decide(None, list, "", step_s)
    assert said == [patience_s]


def test_a_rank_dies() -> None:
    found = run_ranks(cases.dies, 2, 5, meet=False, timeout_s=60)
    assert found[1] == 3
    assert len(found[0]["told"]) == 1
    assert "rank 0 waits for rank 1, which did not come to the end of step " in found[0]["told"][0]
    assert found[0]["seconds"] < MOST_S


def test_what_is_prepared_on_all_ranks_is_tried_once_all_are_ready(everyone: Everyone) -> None:
    found = everyone("prepared")
    assert found[0]["rows"]["prepared"][0] == "kept", found[0]["rows"]
    assert [one["alive"] for one in found] == [True, True]
