"""Where the reports of a script's models are written."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import accel
from accel import entry
from accel.report.report import numbered
from accel.script.training import ScriptTraining
from tests.accel.loops import make
from tests.accel.script_followed import OPTIONS, epochs, training

__all__ = ["training"]


def test_each_model_s_report_has_a_place(training: ScriptTraining, tmp_path: Any) -> None:
    training.models._options["report"] = tmp_path / "runs"
    for seed in range(2):
        epochs(*make(seed), 1)
    entry._at_exit()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "runs-2"]
    assert accel.Report.load(tmp_path / "runs-2" / "report.json").steps >= 8


@pytest.mark.parametrize(
    ("place", "second"),
    [("runs/lr0.001", "runs/lr0.001-2"), ("runs/a.b.json", "runs/a.b-2.json"), ("page.html", "page-2.html")],
)
def test_only_what_names_a_kind_of_report_stays_at_the_end(place: str, second: str) -> None:
    assert [numbered(Path(place), model) for model in (1, 2)] == [Path(place), Path(second)]


def test_reports_are_written_of_so_many_models_only(
    only_quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loop that copies its model for each of a hundred thousand tasks would leave as many folders."""
    places: list[Path | None] = []
    optimize = entry.optimize

    def seen(*objects: Any, **options: Any) -> Any:
        places.append(options["report"])
        return optimize(*objects, **options)

    monkeypatch.setattr(entry, "optimize", seen)
    training = ScriptTraining({**OPTIONS, "report": tmp_path / "out"}, threading.get_ident(), whole="", earlier=30)
    training.start()
    try:
        for seed in range(4):
            model, loader, optimizer = make(seed)
            epochs(model, loader, optimizer, 1)
    finally:
        training.stop()
        training.models.undo()
    assert places == [tmp_path / "out-31", tmp_path / "out-32", None, None]
    assert capsys.readouterr().err.count("no more reports are written") == 1
