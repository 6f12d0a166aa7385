"""What a change of ranks cost is counted from the ranks' own lines."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import resizing
from benchmarks.recovery import Workers
from benchmarks.resizing import Change, change, rows_of
from tests.benchmarks.test_recovery import worker


class Job:
    """A job whose ranks have written down their steps by the time that it is changed."""

    kept = True

    def __init__(self, resize: Any) -> None:
        self.resize = resize


def test_the_longest_time_without_a_step_and_that_until_all_ranks_step(tmp_path: Path) -> None:
    now = time.time() + 100.0  # when it is called is before all of these

    def resize(ranks: int) -> None:
        worker(tmp_path, "1-10", (now, 1, 1), (now + 1, 2, 1), (now + 1.5, 3, 2), (now + 2.0, 4, 2))
        worker(tmp_path, "2-11", (now + 1.75, 3, 2), (now + 2.0, 4, 2))

    found = change(Job(resize), Workers(tmp_path), 2)  # type: ignore[arg-type]
    assert found.kept and found.gap_s == pytest.approx(1.0)
    assert 101.0 < found.whole_s < 102.0
    assert found.repeated == 0


def test_a_row_is_of_all_changes_of_a_kind() -> None:
    found = [Change(True, 0.25, 3.0, 0), Change(False, 2.5, 5.0, 2), Change(True, 0.5, 4.0, 0)]
    (row,) = rows_of("in place", {"1 to 2": found})
    assert (row["way"], row["change"], row["rounds"], row["kept"]) == ("ranks that stay kept", "1 to 2", 3, 2)
    assert (row["gap_s"], row["whole_s"], row["repeated"]) == (0.5, 4.0, 2)
    assert row["gap"] == "[0.25, 2.50]"
    assert row.keys() <= resizing.RECORD.columns.keys()
