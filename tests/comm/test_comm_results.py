"""How figures of communication are kept and compared: a run replaces what it measured again, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from benchmarks.comm.accuracy_tasks import TASKS, learning_rate
from benchmarks.comm_accuracy import METHODS, RECORD, compare, launch, write
from benchmarks.comm_hooks import RECORD as HOOKS
from benchmarks.comm_hooks import with_baselines
from benchmarks.record import Column, Record, replaced
from benchmarks.render import Row


def measured(method: str, rate: str = "1gbit", run: int = 1) -> dict[str, Any]:
    return {"shape": "2x1", "rate": rate, "method": method, "run": run}


def merged(before: list[Row], rows: list[Row]) -> list[Row]:
    return replaced(before, with_baselines(before, rows), HOOKS.key)


def test_a_run_replaces_its_own_rows_alone() -> None:
    before = [measured("ddp"), measured("int8"), measured("powersgd"), measured("ddp", "100mbit")]
    found = merged(before, [measured("ddp", run=2), measured("powersgd", run=2)])
    # The DDP of int8's launch stays with it.
    kept = [measured("ddp"), measured("int8"), measured("ddp", "100mbit")]
    assert found == [*kept, measured("powersgd", run=2)]
    again = [measured("ddp", run=3), measured("powersgd", run=3), measured("int8", run=3)]
    assert merged(found, again) == [measured("ddp", "100mbit"), *again]
    assert merged([], again) == again


def trained(method: str, seed: int, score: float, task: str = "text", steps: int = 10) -> Row:
    row = {"task": task, "method": method, "compressor": "X()", "ranks": 2, "steps": steps, "batch": 4, "seed": seed}
    row |= {"score": score, "unit": TASKS[task].judged, "train_loss": 2.0, "replicas_equal": True, "data": "made"}
    return row


def test_differences_are_those_of_pairs_of_one_seed() -> None:
    rows = [trained("exact", 0, 2.0), trained("exact", 1, 1.0), trained("int8", 0, 2.03), trained("int8", 1, 1.0)]
    dense, int8 = compare(rows)
    assert dense["mean"] == 1.5
    assert "within" not in dense
    assert int8["better_by"] == pytest.approx(-0.0075)
    assert (int8["lowest"], int8["highest"]) == pytest.approx((-0.015, 0.0))
    assert int8["within"]
    assert not compare([trained("exact", 0, 2.0), trained("1-bit", 0, 2.03)])[1]["within"]
    points = [trained("exact", 0, 90.0, "images"), trained("dgc", 0, 89.4, "images")]
    assert compare(points)[1]["better_by"] == pytest.approx(-0.6)
    assert not compare(points)[1]["within"]


def test_seeds_are_written_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    first, second = trained("int8", 0, 2.0), trained("exact", 0, 2.0)
    for row in (first, second, trained("int8", 0, 1.9), trained("int8", 0, 80.0, "images", steps=9)):
        write(row, "command")
    assert [row["score"] for row in RECORD.rows()] == [80.0, 2.0, 1.9]  # in the order of tasks and methods
    write(trained("int8", 1, 1.8, steps=20), "command")  # other settings: nothing to compare with
    assert [row["steps"] for row in RECORD.rows()] == [9, 20]
    written = record.newest("comm-accuracy")
    assert written is not None
    assert {line["task"] for line in written["compared"]} == {"images", "text"}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_on_every_rank(method: str, tmp_path: Path) -> None:
    (tmp_path / "made_gut.txt").write_text("To be, or not to be, that is the question.\n" * 500)
    task = TASKS["text"]._replace(steps=8)
    found = list(launch("text", task, method, [0, 1], str(tmp_path)))
    assert [one["seed"] for one in found] == [0, 1]
    assert all(one["replicas_equal"] for one in found)
    assert all(0 < one["score"] < 100 for one in found), found  # eight steps at the full rate may end above the start


def test_learning_rate_warms_up_and_ends_near_nothing() -> None:
    rates = [learning_rate(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.001


def test_rows_of_an_earlier_day_are_kept_and_say_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    (tmp_path / "made-cpu-2001-02-03.json").write_text(json.dumps({"date": "2001-02-03", "rows": [{"a": 1}]}))
    made = Record("made", "a test", {"a": Column("a figure")})
    assert made.rows() == [{"date": "2001-02-03", "a": 1}]
    made.write([{"a": 2}], "command")
    assert made.rows() == [{"a": 2}]
    assert Record("other", "a test").rows() == []
