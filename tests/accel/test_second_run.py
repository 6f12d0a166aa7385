"""The second run of a script: what the first one found is on within some twenty steps, and training stays the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import accel
from accel import strategies
from accel.search.plan import Plan
from tests import warm
from tests.accel.loops import (
    Quick,
    advance_until,
    assert_same,
    everything,
    make,
    plain_run,
    play_clock,
    settled,
    training,
)

ROOT = Path(__file__).resolve().parents[2]


class Lossy(Quick):
    """Faster, and beyond the level."""

    name = "lossy"
    exactness = strategies.Exactness.LOSSY


class Slow(Quick):
    """Waits in each call."""

    name = "slow"

    def enable(self, run: Any, setting: Any) -> None:
        def waiting(call: Any) -> Any:
            def called(*args: Any) -> Any:
                from tests.accel import loops

                assert loops.clock is not None
                loops.clock.sleep(0.002)
                return call(*args)

            return called

        run.gate.add(self.name, waiting)

    def disable(self, run: Any) -> None:
        run.gate.remove(self.name)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACCEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


def content(cache: Path) -> Any:
    (path,) = cache.iterdir()
    return json.loads(path.read_text(encoding="utf-8"))


def first_run(**options: Any) -> accel.Report:
    model, loader, optimizer = accel.optimize(*make(), **{"allow": "exact", "budget": 60, **options})
    advance_until(training(model, loader, optimizer), settled(model))
    report = accel.explain(model)
    accel.undo(model)
    return report


def test_the_second_run_starts_fast_and_leaves_the_same_bits(
    only_quick: None, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = first_run()
    assert (first.plan, first.remembered) == ({"quick": None}, "")
    assert Path(first.cache).parent == cache
    capsys.readouterr()

    model, loader, optimizer = accel.optimize(*make(), allow="exact")
    loop = training(model, loader, optimizer)
    steps = advance_until(loop, lambda: Quick.on)
    assert steps <= 25  # an epoch's first step and its last, smaller batch don't count
    assert "being checked again" in accel.explain(model).remembered
    steps += advance_until(loop, settled(model))
    report = accel.explain(model)

    assert report.state == "done"
    assert report.steps < first.steps
    assert report.speedup is not None
    assert report.speedup > 1.5
    assert re.fullmatch(
        r"from \d{4}-\d\d-\d\d \d\d:\d\d: plan quick \(\d\.\d\dx then\); checked again: kept", report.remembered
    )
    assert report.rows[0].status == "kept"
    assert report.training_same == "same bits"
    text = str(report)
    assert "remembered: from " in text
    assert "checked again: kept" in " ".join(text.split())
    assert "accel: remembered from " in capsys.readouterr().err
    assert_same(everything(model, optimizer), plain_run(steps))
    accel.undo(model)
    assert not Quick.on


def test_under_exact_no_file_switches_on_what_is_not(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "REGISTRY", [Quick, Lossy])
    play_clock(monkeypatch.setattr)
    first_run()
    (path,) = cache.iterdir()
    written = content(cache)
    written["found"]["plan"] = {"lossy": None, "quick": "import os"}
    path.write_text(json.dumps(written), encoding="utf-8")
    report = first_run()
    assert report.plan == {"quick": None}
    assert {row.name: row.status for row in report.rows} == {"quick": "kept", "lossy": "not allowed"}


@pytest.mark.parametrize("how", ["argument", "variable", "plan"])
def test_switched_off_it_neither_reads_nor_writes(
    how: str, only_quick: None, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {}
    if how == "argument":
        options["cache"] = False
    elif how == "plan":
        options["plan"] = Plan(fingerprint=accel.explain(optimized := accel.optimize(*make())[0]).fingerprint, model="")
        accel.undo(optimized)
    else:
        monkeypatch.setenv("ACCEL_CACHE", "0")
    report = first_run(**options)
    assert (report.remembered, report.cache) == ("", "")
    assert not cache.exists()


def test_a_folder_that_cannot_be_written_is_reported_and_the_run_goes_on(
    only_quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("ACCEL_CACHE", str(tmp_path / "file"))
    report = first_run()
    assert report.plan == {"quick": None}
    assert report.cache.startswith("nothing is remembered: ")
    assert capsys.readouterr().err.count("nothing is remembered") == 1


SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
import accel
from accel import strategies
from tests.accel import loops
from tests.accel.loops import Quick

strategies.REGISTRY[:] = [Quick]
loops.play_clock()
model, loader, optimizer = accel.optimize(*loops.make(), allow="exact")
loop = loops.training(model, loader, optimizer)
steps = loops.advance_until(loop, lambda: Quick.on)
loops.advance_until(loop, loops.settled(model))
print(steps, accel.explain(model).steps, accel.explain(model).remembered)
"""


def test_a_process_reads_what_another_left(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    environment = {"ACCEL_CACHE": str(tmp_path / "cache")}
    runs = [warm.run(["train.py"], cwd=tmp_path, environment=environment) for _ in range(2)]
    assert all(run.returncode == 0 for run in runs), runs
    (_, first, *nothing), (fast, second, *remembered) = (run.stdout.split() for run in runs)
    assert nothing == []
    assert int(fast) <= 25
    assert int(second) < int(first)
    assert " ".join(remembered).endswith("checked again: kept")
