"""The faults put into decisions: each place still exists, and by `make slow` each fault is caught by a test."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import decision_faults
from benchmarks.decision_faults import Caught
from benchmarks.decisions import of_machine, of_numbers, of_search
from benchmarks.decisions.fault import Change, Fault, returns
from benchmarks.decisions.table import FAULTS

EACH_FAULT = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)

DECISIONS = {
    *("trial", "budget", "search", "remembered plans"),
    *("guard", "batch size", "learning rate", "checkpoints"),
    *("crowd meter", "verdict", "loader", "scheme"),
}


@EACH_FAULT
def test_place_and_tests_still_exist(fault: Fault) -> None:
    right = fault.right()
    assert fault.change(right) is not right
    assert fault.tests
    assert not fault.missing_tests()


def test_each_decision_has_faults_and_each_fault_a_name_of_its_own() -> None:
    assert len(FAULTS) == sum(len(part.FAULTS) for part in (of_search, of_numbers, of_machine))
    assert {fault.decision for fault in FAULTS.values()} == DECISIONS


@pytest.mark.slow
@EACH_FAULT
def test_fault_is_caught_by_the_default_run(fault: Fault) -> None:
    caught = decision_faults.caught_by(fault)
    assert caught.test, caught.outcome


# How a fault is put in


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Return a module with a decision, and one that has imported it by its name."""
    owner, user = ModuleType("played_owner"), ModuleType("played_user")
    exec("LIMIT = 0.1\ndef decide(): return 'right'\nclass Judge:\n    def judge(self): return 'right'\n", vars(owner))
    vars(user).update(decide=vars(owner)["decide"], LIMIT=vars(owner)["LIMIT"], Judge=vars(owner)["Judge"])
    for module in (owner, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return owner, user


def played(place: str, change: Change) -> Fault:
    return Fault("played", "trial", "does it wrong", f"played_owner:{place}", change, ())


def test_a_place_that_is_gone_is_an_error(modules: tuple[Any, Any]) -> None:
    with pytest.raises(AttributeError):
        played("judge_no_more", returns(None)).right()


# What the tests said


@pytest.mark.parametrize(
    ("status", "printed", "expected"),
    [
        (
            1,
            "FAILED tests/a.py::test_b[c d] - assert 1 == 2\n1 failed",
            Caught("tests/a.py::test_b[c d]", "assert 1 == 2"),
        ),
        (1, "FAILED tests/a.py::test_b\n1 failed", Caught("tests/a.py::test_b")),
        (
            1,
            "FAILED tests/a.py::test_b - TypeError: _fault.<locals>.tried() got an unexpected argument 'limited'\n",
            Caught(
                "",
                "the fault no longer fits the code: "
                "TypeError: _fault.<locals>.tried() got an unexpected argument 'limited'",
            ),
        ),
        (0, "12 passed", Caught("", "all tests passed")),
        (1, "ERROR tests/a.py - ImportError\n1 error", Caught("", "exit status 1: 1 error")),
        (5, "", Caught("", "exit status 5: ")),
    ],
    ids=["failed", "without words", "outdated", "passed", "import", "nothing"],
)
def test_only_a_test_that_fails_catches_a_fault(status: int, printed: str, expected: Caught) -> None:
    assert decision_faults.first_failure(status, printed) == expected


def test_a_fault_that_is_missed_ends_the_command_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_faults, "caught_by", lambda fault: Caught("", "all tests passed"))
    done = CliRunner().invoke(decision_faults.main, ["keeps_a_loser", "budget_never_ends"])
    assert done.exit_code == 1
    assert "FAIL keeps_a_loser" in done.output
    assert "0 of 2 caught" in done.output
