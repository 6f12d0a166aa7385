"""What a kill cost is counted from the workers' own lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import recovery
from benchmarks.recovery import Recovery, Workers, row_of


def worker(folder: Path, name: str, *lines: tuple[float, int, int]) -> None:
    text = "".join(json.dumps({"at": at, "step": step, "world": world}) + "\n" for at, step, world in lines)
    (folder / f"{name}.jsonl").write_text(text + '{"at": 99', encoding="utf-8")  # someone still writes


def test_any_worker_and_both(tmp_path: Path) -> None:
    worker(tmp_path, "1-10", (1.0, 1, 2), (2.0, 2, 2), (5.0, 3, 1), (6.0, 4, 1), (7.0, 5, 2))  # went on alone
    worker(tmp_path, "1-11", (1.1, 1, 2), (2.1, 2, 2))
    worker(tmp_path, "2-12", (7.5, 5, 2))
    workers = Workers(tmp_path)
    assert workers.wait_for(2, 1, since=3.0, fewer=True) == 5.0
    assert workers.wait_for(2, 1, since=3.0) == 7.5
    assert workers.wait_for(2, 2) == 2.1


def test_a_row_counts_what_did_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [Recovery(1.0, 2.0, 3), RuntimeError("gone"), Recovery(3.0, 6.0, 5)]

    def next_of(way: str) -> Recovery:
        outcome = outcomes.pop(0)
        if isinstance(outcome, RuntimeError):
            raise outcome
        return outcome

    monkeypatch.setattr(recovery, "recovery", next_of)
    row = row_of("script", 3)
    assert (row["rounds"], row["failed"], row["still_s"], row["whole_s"], row["repeated"]) == (3, 1, 2.0, 4.0, 4)
    assert row["still"] == "[1.0, 3.0]"
    assert row.keys() <= recovery.RECORD.columns.keys()
