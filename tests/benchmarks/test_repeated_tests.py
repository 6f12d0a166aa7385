"""What is read of repeated runs of the tests, and when one counts as green."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import repeated_tests
from benchmarks.repeated_tests import CONDITIONS, Outcome, is_green

_TESTS = """
import pytest

def test_a(): pass
def test_b(): assert 0, "no"
@pytest.mark.skip(reason="no CUDA here")
def test_c(): pass
@pytest.fixture
def broken(): raise RuntimeError
def test_d(broken): pass
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str]:
    """What pytest itself prints, so that another version of it is noticed."""
    folder = tmp_path_factory.mktemp("tests")
    (folder / "test_these.py").write_text(_TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "test_these.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_what_pytest_says_at_its_end_is_read(printed: tuple[int, str]) -> None:
    outcome = Outcome.of(*printed)
    assert outcome.counts == {"passed": 1, "failed": 1, "skipped": 1, "error": 1}
    assert sorted(outcome.failures) == ["test_these.py::test_b", "test_these.py::test_d"]
    assert outcome.skips == {"no CUDA here": 1}
    row = outcome.row("quiet", 1, 2.34)
    assert (row["passed"], row["failed"], row["skipped"], row["seconds"], row["status"]) == (1, 2, 1, 2.3, 1)
    assert not is_green(row)


def green(**changes: Any) -> dict[str, Any]:
    return {**Outcome(0, {"passed": 5, "skipped": 1}, (), {"needs CUDA": 1}).row("quiet", 1, 1.0), **changes}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"failed": 1}, False),
        ({"status": 2}, False),  # as when the slowest ten have grown
        ({"status": None}, False),  # it was ended
        ({"passed": 0}, False),
        ({"skips": {"the machine is busy": 1}}, False),
    ],
    ids=str,
)
def test_green_is_a_run_without_failures_and_without_skips_for_load(changes: dict[str, Any], expected: bool) -> None:
    assert is_green(green(**changes)) is expected


def test_conditions_are_those_of_the_manual() -> None:
    assert {name: condition.times for name, condition in CONDITIONS.items()} == {
        "quiet": 10,
        "busy_core": 5,
        "one_core": 2,
        "nice": 2,
        "random_order": 3,
        "file_alone": 1,
    }


def test_what_has_run_is_recorded_when_the_rest_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight minutes of tests were lost with the run after them."""

    def tests(number: int) -> Outcome:
        if number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        return Outcome(0, {"passed": 5})

    written: list[Any] = []
    monkeypatch.setitem(repeated_tests.CONDITIONS, "quiet", repeated_tests.Condition("short", 3, tests))
    monkeypatch.setattr(repeated_tests.Record, "write", lambda self, rows, command: written.extend(rows))
    before = signal.getsignal(signal.SIGTERM)
    done = CliRunner().invoke(repeated_tests.main, ["quiet", "--record"])
    assert (done.exit_code, [row["number"] for row in written]) == (128 + signal.SIGTERM, [1])
    assert signal.getsignal(signal.SIGTERM) == before
