"""The benchmark of gradient kernels: its cases are right, here on a CPU, and a wrong one is not timed."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import gradient_kernels

CASES = {case.name: case for case in gradient_kernels.cases("cpu", 70_001)}


def test_every_op_has_a_case() -> None:
    words = (
        "int8 encode",
        "int8 sum",
        "int8 decode",
        "1-bit encode",
        "1-bit sum",
        "1-bit decode",
        "maxima",
        "at least",
    )
    assert [any(word in name for name in CASES) for word in (*words, "largest")] == [True] * (len(words) + 1)


@pytest.mark.parametrize("name", CASES)
def test_case_is_right_and_its_rivals_run(name: str) -> None:
    case = CASES[name]
    assert case.right()
    assert case.rivals
    for call in case.rivals.values():
        call()
    assert case.right()
    assert case.cost.bytes > 0


def test_what_is_wrong_is_not_timed() -> None:
    wrong = dataclasses.replace(CASES["int8 encode"], right=lambda: False)
    assert "wrong" in gradient_kernels._row(wrong, 1e12)["failed"]
