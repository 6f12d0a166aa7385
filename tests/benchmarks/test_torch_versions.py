"""Which versions of torch the tests run under, and what is recorded of that."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from typing import Any

import pytest
import tomllib
from click.testing import CliRunner

from benchmarks import torch_versions
from benchmarks.record import ROOT
from benchmarks.repeated_tests import Outcome

GREEN = Outcome(0, {"passed": 5, "skipped": 1}, (), {"needs CUDA": 1})
RED = Outcome(1, {"passed": 4, "failed": 1}, ("tests/test_a.py::test_a",))


def test_the_versions_hold_the_oldest_that_is_promised_and_the_one_of_ci() -> None:
    lowest = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pinned = re.search(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert lowest and pinned
    assert torch_versions.VERSIONS[0].startswith(f"{lowest[1]}.")
    assert pinned[1] in torch_versions.VERSIONS


@pytest.mark.parametrize(("outcomes", "code"), [([GREEN, GREEN], 0), ([GREEN, RED], 1)])
def test_each_version_is_recorded_as_it_ends(
    monkeypatch: pytest.MonkeyPatch, outcomes: list[Outcome], code: int
) -> None:
    made: list[tuple[list[str], str]] = []
    written: list[tuple[list[dict[str, Any]], str]] = []
    filled: list[int] = []

    def run_tests(command: list[str], environ: dict[str, str]) -> Outcome:
        made.append((command, environ["PYTHONPATH"]))
        return outcomes[len(made) - 1]

    monkeypatch.setattr(torch_versions, "run_tests", run_tests)
    monkeypatch.setattr(
        type(torch_versions.RECORD), "write", lambda self, rows, command: written.append((rows, command))
    )
    monkeypatch.setattr(torch_versions, "fill_pages", lambda: filled.append(len(written)))
    done = CliRunner().invoke(torch_versions.main, [f"2.9.1={sys.executable}", f"2.11.0={sys.executable}"])
    assert done.exit_code == code, done.output
    assert made == [(["make", "--no-print-directory", "test", f"PYTHON={sys.executable}"], str(ROOT))] * 2
    assert [command for _, command in written] == [
        "make versions-test VERSIONS=2.9.1",
        "make versions-test VERSIONS=2.11.0",
    ]
    assert filled == [1, 2]
    ((row,), _), ((last,), _) = written
    assert (row["version"], row["passed"], row["skipped"], row["status"]) == ("2.9.1", 5, 1, 0)
    assert not set(row) - torch_versions.RECORD.columns.keys()
    assert ("tests/test_a.py::test_a" in done.output) == (code == 1)
    assert last["failures"] == list(outcomes[1].failures)
    shown = torch_versions.RECORD.block({"rows": [row, last], "date": "2026-01-01", "machine": "cpu", "cores": 2})
    assert shown.count(f"| {metadata.version('torch')} |") == 2


def test_what_is_installed_can_be_had_from_an_index() -> None:
    own = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
    assert "pytest>=8.1" in torch_versions.packages() and "scikit-learn" in torch_versions.packages()
    assert not [each for each in torch_versions.packages() if each.startswith(own)]
