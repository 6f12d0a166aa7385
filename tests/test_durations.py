"""The list of the slowest tests: what counts as growth."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.durations import Durations, Slowest

RUN = {f"tests/test_a.py::test_{number}": 0.1 for number in range(90)} | {
    f"tests/test_b.py::test_{number}": 1.0 + number for number in range(10)
}
EARLIER = Slowest.of(RUN)


@pytest.mark.parametrize("slower", [0.2, 1.0, 7.0])
def test_a_slower_machine_is_no_growth(slower: float) -> None:
    assert Slowest.of({name: slower * value for name, value in RUN.items()}).growth_over(EARLIER) == ""


def test_a_slow_new_test_is_named() -> None:
    grown = Slowest.of({name: value / 5 for name, value in RUN.items()} | {"tests/test_c.py::test_new": 60.0})
    assert "test_new 60.0 s" in grown.growth_over(Slowest.of({name: 1.0 for name in RUN}))


def test_a_run_of_some_tests_is_not_compared() -> None:
    assert Slowest.of({"tests/test_c.py::test_new": 500.0}).growth_over(EARLIER) == ""


def test_the_list_is_read_as_it_was_written(tmp_path: Path) -> None:
    EARLIER.write(tmp_path / "ten.json")
    assert Slowest.read(tmp_path / "ten.json") == EARLIER
    assert list(EARLIER.seconds.values()) == [10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]


@pytest.mark.parametrize(("seconds", "expected"), [(0.1, pytest.ExitCode.OK), (5.0, pytest.ExitCode.TESTS_FAILED)])
def test_growth_ends_a_green_run_red(seconds: float, expected: pytest.ExitCode, tmp_path: Path) -> None:
    Slowest(100, 10.0, dict.fromkeys(map(str, range(10)), 0.1)).write(tmp_path / "ten.json")
    plugin = Durations(record=False, path=tmp_path / "ten.json")
    for number in range(100):
        for duration in (0.0, seconds if number == 0 else 0.1, 0.0):
            plugin.pytest_runtest_logreport(report(str(number), duration))
    session = cast(pytest.Session, SimpleNamespace(exitstatus=pytest.ExitCode.OK))

    plugin.pytest_sessionfinish(session, pytest.ExitCode.OK)

    assert session.exitstatus == expected


def report(test: str, duration: float) -> pytest.TestReport:
    return cast(pytest.TestReport, SimpleNamespace(nodeid=test, duration=duration))
