"""Benchmarks measure first runs: what an earlier one found must not decide how this one comes out."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Second runs are measured on purpose: what they remember lies in a folder of each benchmark's own.
SECOND_RUNS = ROOT / "benchmarks" / "variants" / "__init__.py"
FILES = [
    path
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
    if "optimize(" in path.read_text("utf-8") and path != SECOND_RUNS
]


def calls(source: str) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "accel.optimize":
            yield node


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_benchmark_reads_or_leaves_what_is_remembered(path: Path) -> None:
    for call in calls(path.read_text("utf-8")):
        assert {"cache": "False"}.items() <= {k.arg: ast.unparse(k.value) for k in call.keywords}.items()


def test_some_benchmarks_call_it() -> None:
    assert sum(len(list(calls(path.read_text("utf-8")))) for path in FILES) >= 3


def test_no_test_reads_or_leaves_what_is_remembered() -> None:
    assert os.environ["ACCEL_CACHE"] == "0"
