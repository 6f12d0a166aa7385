"""The search on real ranks: what is allowed, agreement, falling back when the prediction is wrong, and the verdict."""

from __future__ import annotations

from typing import Any

import pytest

from accel.comm.catalogue import LEVELS
from tests.comm import selector_cases as cases
from tests.comm.cases import WAIT
from tests.comm.ranks import run_ranks
from tests.conftest import Once


def same_on_all(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what rank 0 found, once all ranks have been seen to have gone the same way with the same weights."""
    for one in found:
        assert one["same"]
        for key in ("plan", "plans", "options", "steps"):
            assert one.get(key) == found[0].get(key), key
    return found[0]


BETWEEN = ("reordered", "reduced")
EACH_LEVEL = [pytest.param(level, marks=[pytest.mark.slow] if level in BETWEEN else []) for level in LEVELS]


@pytest.fixture
def search(once: Once, level: str) -> dict[str, Any]:
    return once(f"search {level}", lambda: same_on_all(run_ranks(cases.real_search, 2, level)))


@pytest.mark.parametrize("level", EACH_LEVEL)
def test_the_search_ends_and_considers_nothing_beyond_what_is_allowed(search: dict[str, Any], level: str) -> None:
    assert search["settled"]
    assert all(LEVELS.index(one) <= LEVELS.index(level) for one in search["levels"])
    wanted = {"exact": [], "reordered": [], "reduced": ["reduced"], "lossy": ["lossy", "reduced"]}
    assert search["levels"] == wanted[level]  # one rank to a host: nothing to be summed there first
    assert level in {"reduced", "lossy"} or search["steps"] == 1


@pytest.mark.parametrize("level", EACH_LEVEL[:2])
def test_where_nothing_is_allowed_nothing_is_measured(search: dict[str, Any], level: str) -> None:
    assert search["verdict"] == f"gradients: left as they are, allow={level!r} leaves nothing to choose"


def test_one_rank_has_nothing_to_choose() -> None:
    (found,) = run_ranks(cases.real_search, 1, "lossy")
    assert found["verdict"] == "gradients: left as they are, there is one rank"
    assert found["plan"] is None


@pytest.mark.slow
def test_four_ranks_on_two_hosts_agree() -> None:
    found = same_on_all(run_ranks(cases.real_search, 4, "lossy", per_host=2))
    assert any(way is not None and way.hierarchical for way in found["options"])


def test_what_is_predicted_best_and_proves_so_is_taken() -> None:
    found = same_on_all(run_ranks(cases.search, 2, {"quick": (0.0, "reduced")}, "reduced", True))
    assert found["plan"] == "quick"
    assert found["measured"]["quick"] < found["measured"]["plain"]
    assert found["verdict"].startswith("gradients: quick, a step takes ")
    assert "in place of" in found["verdict"]
    assert found["hooks"] == 1
    assert found["plans"][0] == "plain"  # first the steps as they are


def test_a_wrong_prediction_makes_the_next_best_be_tried() -> None:
    # "fib" says that it sends less work than it does; "true" is what it says.
    entries = {"fib": (0.06, "reduced"), "true": (0.0, "lossy")}
    found = same_on_all(run_ranks(cases.search, 2, entries, "lossy", True))
    assert list(dict.fromkeys(found["plans"]))[:3] == ["plain", "fib", "true"]
    assert found["plan"] == "true"
    assert found["measured"]["fib"] > found["measured"]["plain"] > found["measured"]["true"]


def test_where_nothing_keeps_its_promise_ddps_own_stays_and_the_hook_goes() -> None:
    found = run_ranks(cases.search, 2, {"fib": (0.06, "reduced"), "lie": (0.08, "reduced")}, "reduced", True)
    one = same_on_all(found)
    assert one["plan"] == "plain"
    assert {"fib", "lie"} <= set(one["plans"])
    assert one["verdict"].startswith("gradients: left as they are, nothing helps on this network: a step takes ")
    assert "fib took" in one["verdict"]
    assert "lie took" in one["verdict"]
    assert "<- chosen" in next(line for line in one["explained"].splitlines() if line.startswith("plain"))
    assert [each["hooks"] for each in found] == [0, 0]
    assert [each["threads"] for each in found] == [0, 0]


def test_where_the_model_sees_no_gain_nothing_is_tried() -> None:
    # The network is played to be slow, and real steps are not: the model is set right by them.
    found = same_on_all(run_ranks(cases.search, 2, {"fib": (0.06, "reduced")}, "reduced", False))
    assert found["plan"] == "plain"
    assert found["verdict"].startswith("gradients: left as they are, nothing helps on this network: a step takes ")
    assert "is predicted to take" in found["verdict"] or "took" in found["verdict"]


def test_closing_ends_the_search() -> None:
    for found in run_ranks(cases.closed_early, 2):
        for steps, one in found.items():
            assert one["settled"], steps
            assert one["equal"], steps
            if one["searching"]:
                assert one["verdict"] == "gradients: left as they are, the search was closed before its end"
        assert found[1]["searching"]
        assert found[4]["searching"]


@pytest.mark.slow
def test_a_resumed_run_searches_anew() -> None:
    for found in run_ranks(cases.resumed, 2):
        assert found == {"allow": "reduced", "watch": 2, "settled": True, "step": 4}


def test_a_rank_that_ends_during_the_search_is_an_error_on_the_others() -> None:
    found = run_ranks(cases.dies_in_the_search, 2, meet=False)
    assert found[1] == 3
    assert found[0]["said"].startswith("CommError: rank 0 could not agree with the others on how gradients go: ")
    assert found[0]["seconds"] < WAIT.total_seconds()
