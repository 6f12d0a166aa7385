"""The benchmark on measured profiles: made-up ones whose model and noise are known, and what was recorded."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.goodput.efficiency import NoiseInterval
from accel.goodput.observations import Configuration
from benchmarks import pollux
from benchmarks.goodput import profiles
from benchmarks.goodput.iterations import gain
from benchmarks.record import newest
from tests.accel.goodput.goodput_cases import TYPICAL

PLACEMENTS = ("1", "2", "4", "11", "12", "22", "44", "111", "1234", "4444")
COUNTS = ((6, 12), (8, 32))
BATCHES = (8, 16, 64, 256)
BASE = 32
SHARES = {"first": 0.8, "second": 0.3}


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    listed = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(listed[0]))
        writer.writeheader()
        writer.writerows(listed)


def made_runs(folder: Path, share: float, epochs: int = 8) -> None:
    """Write runs whose noise grows with the batch, and who took the steps that their own noise says."""
    for scale in (1, 2, 4, 32):
        base_noise = BASE * np.geomspace(5, 200, epochs)
        noise = [NoiseInterval(n, n, n, batch=BASE, share=share).at(BASE * scale) for n in base_noise.tolist()]
        steps = np.cumsum([100 / gain(BASE * scale, BASE, each) for each in noise])
        rows = [
            {"progress": 100 * (epoch + 1), "iteration": steps[epoch], "metric": 0.5, "grad_sqr": 2.0}
            | {"grad_var": 2.0 * noise[epoch] / BASE}
            for epoch in range(epochs)
        ]
        write(folder / f"validation-{BASE * scale}.csv", rows)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, share in SHARES.items():
        folder = tmp_path / "traces" / name
        placed = [
            {"placement": placement, "local_bsz": batch}
            | {"step_time": TYPICAL.step_s(len(placement), sum(map(int, placement)), batch), "sync_time": 0}
            for placement, batch in itertools.product(PLACEMENTS, BATCHES)
        ]
        counted = [
            {"num_nodes": nodes, "num_replicas": replicas, "local_bsz": batch}
            | {"step_time": TYPICAL.step_s(nodes, replicas, batch), "sync_time": 0}
            for (nodes, replicas), batch in itertools.product(COUNTS, BATCHES)
        ]
        write(folder / "placements.csv", placed)
        write(folder / "scalability.csv", counted)
        made_runs(folder, share)
    return tmp_path


def test_tables_are_read_with_both_files(data: Path) -> None:
    first, second = profiles.tables(data)
    assert (first.application, first.gpu, second.application) == ("first", "T4", "second")
    assert len(first.configurations) == (len(PLACEMENTS) + len(COUNTS)) * len(BATCHES)
    assert Configuration(4, 10, 16) in first.configurations
    assert Configuration(8, 32, 256) in first.configurations
    few, many = first.up_to(8), first.above(8)
    assert (few.replicas.max(), many.replicas.min()) == (8, 10)
    assert len(few.seconds) + len(many.seconds) == len(first.seconds)
    assert len(first.drawn(20, 1).seconds) == 20
    with pytest.raises(FileNotFoundError, match=r"must hold traces/<application>/placements.csv. Found: none"):
        list(profiles.tables(data / "traces"))


def test_a_table_that_the_model_made_is_fitted_and_extrapolated(data: Path) -> None:
    ticks = itertools.count()
    row = pollux.judge(next(profiles.tables(data)), 3, lambda: float(next(ticks)))
    assert set(row) == set(pollux.STEP_TIMES.columns)
    assert row["fit"] < 2
    assert row["extrapolation"] < 10
    assert row["pollux_fit"] > row["fit"]
    assert row["fit_ms"] == row["refit_ms"] == row["started_ms"] == 1000.0
    assert pollux.average([row, {**row, "fit": row["fit"] + 1}])["fit"] == pytest.approx(row["fit"] + 0.5)


def test_steps_that_follow_a_share_are_predicted_by_it(data: Path) -> None:
    rows = list(pollux.count_steps(data, SHARES))
    assert [row["application"] for row in rows] == ["first", "second"] * 2
    for row in rows:
        assert set(row) == set(pollux.STEPS.columns)
        assert row["plain"] > 1.05
        if row["noise"] == "as recorded":
            assert row["median_share"] == pytest.approx(SHARES[row["application"]], abs=0.01)
            assert [row["own"], row["own_least"], row["own_most"]] == pytest.approx([1, 1, 1], abs=0.01)
    # Of two applications the other one's share is its own.
    assert [row["others_share"] for row in rows[:2]] == pytest.approx([0.3, 0.8], abs=0.02)
    assert rows[0]["others"] > 1 > rows[1]["others"]


# What was recorded


def recorded(name: str) -> list[dict[str, Any]]:
    result = newest(name)
    assert result is not None
    rows: list[dict[str, Any]] = result["rows"]
    return rows


def test_recorded_errors_of_the_step_time_are_within_their_bounds() -> None:
    *tables, mean = recorded("pollux-step-times")
    assert (len(tables), mean["table"]) == (6, "mean")
    for name, most in {"fit": 7.0, "extrapolation": 20.0}.items():
        assert mean[name] == pytest.approx(np.mean([row[name] for row in tables]))
        assert mean[name] <= most
    assert max(row["started_p80"] for row in tables) <= 10


def test_recorded_steps_are_within_a_fifth_with_a_share_of_their_own() -> None:
    rows = recorded("pollux-steps")
    assert len({row["application"] for row in rows}) == 5
    for row in rows:
        if row["noise"] != "as recorded":
            assert 1 / 1.2 <= row["own_least"] <= row["own_most"] <= 1.2
