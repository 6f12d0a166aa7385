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
    Net,
    Quick,
    advance,
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


def test_a_remembered_plan_that_became_slow_is_undone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "REGISTRY", [Quick, Slow])
    play_clock(monkeypatch.setattr)
    first_run()
    (path,) = cache.iterdir()
    written = content(cache)
    assert "slow" in written["found"]["lost"]
    written["found"]["plan"] = {"slow": None}
    path.write_text(json.dumps(written), encoding="utf-8")
    report = first_run()
    assert report.plan == {"quick": None}
    assert "checked again: undone (it was not shown to be faster than plain)" in report.remembered
    assert content(cache)["found"]["plan"] == {"quick": None}


def test_what_gave_nothing_is_reported_with_its_date(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "REGISTRY", [Quick, Slow])
    play_clock(monkeypatch.setattr)
    first_run()
    report = first_run()
    rows = {row.name: row for row in report.rows}
    assert rows["slow"].status == "not tried"
    assert re.match(r"tried less than a day ago: 0\.\d\dx, slower; again if", rows["slow"].why)


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


def test_a_run_that_ends_in_its_first_steps_leaves_what_was_remembered(only_quick: None, cache: Path) -> None:
    first_run()
    before = content(cache)
    for steps in (3, 20, 30, 50):
        model, loader, optimizer = accel.optimize(*make(), allow="exact")
        advance(training(model, loader, optimizer), steps)
        accel.undo(model)
        after = content(cache)
        assert after["found"]["plan"] == before["found"]["plan"]
        assert after["checking"] is None


def test_other_arguments_and_other_models_have_files_of_their_own(only_quick: None, cache: Path) -> None:
    class Wider(Net):
        pass

    first_run()
    first_run(allow="reordered")
    first_run(disable=("quick",))
    assert len(list(cache.iterdir())) == 2  # the third run found nothing that could be remembered
    model, loader, optimizer = accel.optimize(*make(kind=Wider), allow="exact", budget=60)
    advance_until(training(model, loader, optimizer), settled(model))
    assert len(list(cache.iterdir())) == 3


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
    environment = {"ACCEL_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    runs = [warm.run(["train.py"], cwd=tmp_path, environment=environment) for _ in range(2)]
    assert all(run.returncode == 0 for run in runs), runs
    (_, first, *nothing), (fast, second, *remembered) = (run.stdout.split() for run in runs)
    assert nothing == []
    assert int(fast) <= 25
    assert int(second) < int(first)
    assert " ".join(remembered).endswith("checked again: kept")
