"""Rows of the fault matrix, as if its scripts had been run."""

from __future__ import annotations

from benchmarks.faults.rivals import RivalAnswer
from benchmarks.faults.rows import Answer, Row, is_right
from benchmarks.faults.table import CASES


def row(name: str, cause: str, error: float | None = None, **rivals: bool) -> Row:
    """Return the row of a case with this first cause, error of its prediction, and answers of rivals, right or not."""
    case = CASES[name]
    answer = Answer(cause, cause.partition(".")[0])
    told = {rival: RivalAnswer("words", right) for rival, right in rivals.items()}
    return Row(case, answer, is_right(case, answer), None, error, told)
