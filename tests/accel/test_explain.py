"""The report of a run: what `explain` tells, where it is written, and whose it is when a cell is run again."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import torch

import accel
from accel import entry, starting
from accel.run import Run
from tests.accel.loops import (
    Net,
    advance,
    go_to,
    make,
    training,
)


def test_explain_tells_how_the_search_stands(only_quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    model, loader, optimizer = accel.optimize(*make(), allow="exact", budget="60s")
    report = accel.explain(model)
    assert (report.state, report.steps, report.model) == ("searching", 0, "Net")
    assert any("any training step" in unseen for unseen in report.unseen)

    loop = training(model, loader, optimizer)
    steps = go_to("hold", loop, model)

    report = accel.explain(model)
    assert report.state == "done"
    assert (report.allow, report.budget) == ("exact", "60s")
    assert report.parameters == sum(p.numel() for p in model.parameters())
    # The first step is before anything is measured, the last is closed when the next batch is asked for.
    assert report.steps == steps - 2
    assert report.plan == {"quick": None}
    assert report.rows[0].status == "kept"
    assert report.speedup is not None
    assert report.speedup > 1.5
    assert "same bits" in report.training_same
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "accel: " in printed.err


def test_explain_refuses_a_model_it_does_not_know() -> None:
    with pytest.raises(accel.AccelError, match="must have been passed to accel"):
        accel.explain(Net())


@pytest.mark.parametrize("target", ["out.json", "out.html", "folder"])
def test_the_report_is_written_where_it_should_go(only_quick: None, tmp_path: Path, target: str) -> None:
    model, loader, optimizer = accel.optimize(*make(), budget=60, report=tmp_path / target)
    loop = training(model, loader, optimizer)
    go_to("hold", loop, model)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    whole = [os.path.join("folder", name) for name in ("plan.json", "report.html", "report.json")]
    assert found == (whole if target == "folder" else [target])
    if target == "folder":
        assert accel.Report.load(tmp_path / "folder" / "report.json").state == "done"
        accel.undo(model)
        assert accel.Report.load(tmp_path / "folder" / "report.json").state == "undone"


def test_two_models_with_one_place_have_a_report_each(
    only_quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a GAN's; the one that ended last overwrote the other."""
    models = [make(seed) for seed in range(2)]
    for model, loader, optimizer in models:
        accel.optimize(model, loader, optimizer, budget=60, report=tmp_path / "gan")
    assert capsys.readouterr().err.count(str(tmp_path / "gan-2")) == 1
    accel.optimize(*models[0], budget=50, report=tmp_path / "gan")  # with other settings: its own place
    assert str(tmp_path / "gan-3") not in capsys.readouterr().err
    for model, *_ in reversed(models):
        accel.undo(model)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["gan", "gan-2"]
    accel.optimize(*make(2), budget=60, report=tmp_path / "gan")  # those before are over
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("interactive", [True, False])
@pytest.mark.parametrize("scheduled", [True, False])
def test_a_cell_that_is_run_again_has_the_loader_for_its_new_model(
    only_quick: None, monkeypatch: pytest.MonkeyPatch, interactive: bool, scheduled: bool
) -> None:
    """The session of the model before kept it: strategies for the loader were never tried again."""
    if interactive:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    model, loader, optimizer = accel.optimize(*make(), budget=60)
    fetching = entry.MODELS[model].session.run.fetching
    advance(training(model, loader, optimizer), 20)
    before = model
    model, _, optimizer = make(1)
    if scheduled:
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60)
    assert (entry.MODELS[model].session.run.fetching is fetching) == interactive
    assert (entry.optimized(before) is None) == interactive


@pytest.mark.parametrize("interactive", [True, False])
def test_a_cell_that_makes_its_loader_anew_too_has_the_place_of_its_report(
    only_quick: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    interactive: bool,
) -> None:
    """Each run of it had a report of another number."""
    if interactive:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    trained = [accel.optimize(*make(9), budget=60, report=report)[0] for report in (None, tmp_path / "other")]
    for seed in range(3):
        model, loader, optimizer = make(seed)
        model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60, report=tmp_path / "one")
        advance(training(model, loader, optimizer), 20)
    assert ("has the report of another model" in capsys.readouterr().err) != interactive
    accel.undo(model)
    assert (tmp_path / "one-3").exists() != interactive
    assert all(entry.optimized(model) is not None for model in trained)


def test_the_other_model_of_a_loader_keeps_it_while_it_is_trained(
    only_quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    first, loader, optimizer = accel.optimize(*make(), budget=60)
    second, loader, _ = accel.optimize(make(1)[0], loader, None, budget=60)
    third, loader, _ = accel.optimize(make(2)[0], loader, None, budget=60)
    assert all(entry.optimized(model) is not None for model in (first, second, third))
    assert optimizer is not None


def test_where_the_model_was_trained_is_remembered_when_it_has_left(
    only_quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning takes it back to the CPU before it says that the training has ended."""
    text = "GPU phases: the model runs on the CPU"
    monkeypatch.setattr(Run, "cuda", property(lambda run: True))
    made = make()
    with monkeypatch.context() as patched:
        patched.setattr(starting.Session, "start", lambda self, on_search_end: None)  # which would ask the GPU
        model, *_ = accel.optimize(*made, budget=60)
    monkeypatch.setattr(Run, "cuda", property(lambda run: False))
    assert text not in accel.explain(model).unseen
    other, *_ = accel.optimize(*make(1), budget=60)
    assert text in accel.explain(other).unseen


def _train_in_child(folder: Path) -> None:
    sys.stderr = open(folder / "told", "w")  # noqa: SIM115
    model, loader, optimizer = accel.optimize(*make(), budget=60, report=folder / "report.json")
    advance(training(model, loader, optimizer), 10)
    accel.optimize(*make(1), budget=60)


def test_a_training_in_a_forked_process_has_its_report_in_the_end(only_quick: None, tmp_path: Path) -> None:
    """Such a process leaves without exit handlers; the next run took it for one that was killed."""
    process = multiprocessing.get_context("fork").Process(target=_train_in_child, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    report = accel.Report.load(tmp_path / "report.json")
    assert (report.state, report.steps) == ("interrupted", 8)
    assert (tmp_path / "told").read_text().count("before the search for Net had a verdict") == 1


def test_a_report_that_can_not_be_written_costs_nothing_but_itself(
    only_quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, loader, optimizer = accel.optimize(*make(), budget=60, report=tmp_path / "file" / "report.json")
    (tmp_path / "file").write_text("in the way")
    go_to("hold", training(model, loader, optimizer), model)
    assert accel.explain(model).plan == {"quick": None}
    assert "the report could not be written" in capsys.readouterr().err
    accel.undo(model)
