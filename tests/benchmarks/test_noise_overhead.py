"""The benchmark of what the noise meter and the batch controller add to a step: that each part is at work in it."""

from __future__ import annotations

import pytest

import accel
from benchmarks import noise_overhead


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_overhead, "PIECE_S", 0.005)


@pytest.mark.parametrize("part", noise_overhead.PARTS)
def test_a_row_has_all_columns(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = noise_overhead.PARTS[part][:2]
    monkeypatch.setitem(noise_overhead.PARTS, part, (*kinds, 0.05))
    monkeypatch.setattr(noise_overhead, "WARM_UP_S", 0.01)
    row = noise_overhead.measure("small MLP, 128, SGD", part, rounds=2)
    assert set(row) == set(noise_overhead.RECORD.columns)
    assert row["part"] == part and row["low"] <= row["added"] <= row["high"]
    table = noise_overhead.RECORD.block({"command": "c", "date": "d", "machine": "m", "torch": "t", "rows": [row]})
    assert f"| {part} |" in table


def test_step_times_are_judged_and_decisions_made() -> None:
    loop = noise_overhead.Judged("small MLP, 128, SGD")
    for _ in range(160):
        next(loop._running)
    decisions = loop._controller.decisions
    assert decisions[-1].batch == 128 and decisions[-1].measured and loop._due > 100


def test_the_controller_decides_and_keeps_the_loops_batch() -> None:
    loop = noise_overhead.Controlled("small MLP, 128, SGD")
    for _ in range(160):
        next(loop._running)
    report = accel.explain(loop._model)
    accel.undo(loop._model)
    assert not report.batch_note
    assert [row.batch for row in report.batch_rows] == [128]
    assert report.batch_rows[0].measured
