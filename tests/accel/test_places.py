"""Where reports, checkpoints and remembered plans go is settled at the call, wherever the script goes then."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import accel
from accel.cache import folder
from accel.cache.folder import cache_folder
from accel.commands import profile
from accel.elastic.options import Checkpointing
from accel.profiler.gather import Exchange
from accel.profiler.report import ProfileReport
from accel.profiler.script import Script
from accel.report import Report
from accel.settings import check_settings
from tests.accel import profile_reports
from tests.accel.loops import advance, advance_until, make, settled, training


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in `first` that will change to `second`, which comes back."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    return tmp_path / "second"


def test_a_report_lies_where_the_script_was_when_it_called(only_quick: None, tmp_path: Path, elsewhere: Path) -> None:
    model, loader, optimizer = accel.optimize(*make(), budget=60, report="runs/one")
    os.chdir(elsewhere)
    loop = training(model, loader, optimizer)
    advance_until(loop, settled(model))
    accel.undo(model)
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("report.json")] == [
        Path("first", "runs", "one", "report.json")
    ]
    assert Report.load(tmp_path / "first" / "runs" / "one" / "report.json").state == "undone"
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "settings"])
def test_so_do_checkpoints(elsewhere: Path, kind: str) -> None:
    given: Any = "kept" if kind == "folder" else Checkpointing(folder="kept", keep=2)
    elastic = accel.Elastic(checkpoint=given)
    first: Any = check_settings(make()[0], "exact", (), (), None, 60, None, True, elastic=elastic)
    os.chdir(elsewhere)
    folder = first.checkpoint if kind == "folder" else first.checkpoint.folder
    assert folder == str(elsewhere.parent / "first" / "kept")
    assert kind == "folder" or first.checkpoint.keep == 2


def test_runs_that_change_their_directory_share_what_is_remembered(
    only_quick: None, tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_CACHE", "cache")
    monkeypatch.setattr(folder, "_imported_in", str(tmp_path))
    remembered = []
    for place in (tmp_path / "first", elsewhere):
        os.chdir(place)
        model, loader, optimizer = accel.optimize(*make(), allow="exact", budget=60)
        advance_until(training(model, loader, optimizer), settled(model))
        remembered.append(accel.explain(model).remembered)
        accel.undo(model)
    assert remembered[0] == "" and remembered[1] != ""
    assert [path.name for path in tmp_path.iterdir() if path.is_dir() and list(path.iterdir())] == ["cache"]


def test_the_directory_of_a_relative_cache_is_that_of_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_CACHE", "cache")
    assert cache_folder() == Path(accel._imported_in, "cache")
    assert Path(accel._imported_in).is_absolute()


# -- what can't be written ---------------------------------------------------------------------------------------------


def test_a_command_line_in_another_encoding_is_reported(
    only_quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", os.fsdecode(b"caf\xe9")])
    model, loader, optimizer = accel.optimize(*make(), budget=60, report=tmp_path)
    advance(training(model, loader, optimizer), 5)
    accel.undo(model)
    assert Report.load(tmp_path / "report.json").command == r"python train.py 'caf\udce9'"
    assert r"caf\udce9" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_report_that_can_not_be_put_into_words_costs_nothing_but_itself(
    only_quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(report: Any) -> str:
        raise ValueError("Out of range float values are not JSON compliant")

    for kind in (Report, ProfileReport):
        monkeypatch.setattr(kind, "to_json", broken)
    model, loader, optimizer = accel.optimize(*make(), budget=60, report=tmp_path / "report.json")
    advance_until(training(model, loader, optimizer), settled(model))
    accel.undo(model)
    assert "the report could not be written: Out of range" in capsys.readouterr().err
    job = profile.ProfileJob(Script("none.py", []), Exchange(), profile.ReportFiles.at(tmp_path), "", True, True)
    job._write(profile_reports.full())
    assert "the report could not be written: Out of range" in capsys.readouterr().err
