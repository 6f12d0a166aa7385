"""The report as data: its JSON form, its verdict, and files written whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest

from accel.errors import AccelError, ReportError
from accel.profiler.report import Finding, ProfileReport, Saving, from_json
from accel.report import Event, Machine, Report, StrategyRow
from accel.report.rendering import as_text
from accel.report.report import BatchRow


def _report() -> Report:
    row = StrategyRow(
        name="channels_last", summary="NHWC", treats=["conv"], exactness="reordered", status="kept", gain=1.4
    )
    return Report(
        model="Net",
        machine=Machine(device="cpu (Ünïcode)", cores=2),
        state="done",
        plain_ms=20.0,
        accel_ms=10.0,
        speedup=2.0,
        anatomy_before={"forward": 12.0, "backward": 8.0},
        rows=[row],
        events=[Event(step=3, text="line\nbreak")],
        unseen=["workers"],
        plan={"channels_last": {"dims": 4}},
    )


def test_round_trip_keeps_every_field(tmp_path: Path) -> None:
    report = _report()
    report.save(tmp_path / "deep" / "r.json")
    assert Report.load(tmp_path / "deep" / "r.json") == report


def test_what_json_and_utf_8_can_not_hold_does_not_keep_a_report_from_being_saved(tmp_path: Path) -> None:
    rows = [BatchRow(step=16, batch=32, goodput=math.nan, noise=math.inf)]  # of pure noise
    command = "python train.py --name caf\udce9"  # an argument in Latin-1, as Python has it
    report = dataclasses.replace(_report(), batch_rows=rows, max_batch_size=64, command=command)
    for name in ("r.json", "r.html"):
        report.save(tmp_path / name)
    loaded = Report.load(tmp_path / "r.json")
    assert (loaded.batch_rows[0].noise, loaded.batch_rows[0].goodput, loaded.batch_rows[0].batch) == (None, None, 32)
    assert loaded.command == "python train.py --name caf\\udce9"
    profile = ProfileReport(command=command, samples_per_s=math.inf)
    assert from_json(profile.to_json()).command == loaded.command


def test_json_carries_its_schema_version() -> None:
    assert json.loads(_report().to_json())["schema"] == 1


def test_save_as_html_writes_a_page(tmp_path: Path) -> None:
    _report().save(tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "can't be read as a report"),
        ("", "can't be read as a report"),
        ("[1]", "must have report schema 1, found 'list'"),
        ("{}", "must have report schema 1, found None"),
        ('{"schema": 99}', "must have report schema 1, found 99; make it again"),
        ('{"schema": 1}', "not a whole report"),
        ('{"schema": 1, "machine": {}, "rows": [{"name": "x"}], "events": []}', "not a whole report.*summary"),
        ('{"schema": 1, "machine": {}, "rows": [], "events": [], "surprise": 1}', "not a whole report.*surprise"),
    ],
)
def test_unusable_file_is_named_with_its_fault(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ReportError, match=message) as caught:
        Report.load(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, AccelError)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ReportError, match="can't be read as a report"):
        Report.load(tmp_path / "r.json")


def test_failing_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    path.write_text("old", encoding="utf-8")

    def full_disk(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space left"):
        _report().save(path)
    assert path.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["r.json"], "the temporary file stayed behind"


def test_value_without_json_form_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    _report().save(path)
    old = path.read_text(encoding="utf-8")
    broken = _report()
    broken.plan = {"channels_last": object()}
    with pytest.raises(TypeError, match="not JSON serializable"):
        broken.save(path)
    assert path.read_text(encoding="utf-8") == old


def test_verdict_is_in_samples_where_they_are_known() -> None:
    report = _report()
    report.samples_per_step, report.training_same = 32, "gradients agree to 3e-07"
    assert report.verdict() == "2.00x: 1,600 → 3,200 samples/s, gradients agree to 3e-07"


def test_verdict_without_a_plan_claims_no_gain() -> None:
    report = _report()
    report.plan = {}
    report.rows[0].status = "undone"
    assert report.verdict() == "left as it was: nothing tried made the step faster (20 ms)"
    report.rows[0].status = "not tried"
    assert report.verdict() == "left as it was: nothing was tried (20 ms)"


def test_verdict_of_a_search_that_is_over_says_that_no_more_will_come() -> None:
    words = {"summary": "", "treats": (), "exactness": "exact", "status": "kept"}
    row = StrategyRow(name="allocator", gain=1.2, gain_low=1.1, gain_high=1.3, **words)
    kept = Report(steps=7, state="done", rows=[row]).verdict()
    assert kept == (
        "no speed-up of the whole: what is kept now was not compared with the plain loop again; "
        "each alone: allocator 1.20x [1.10, 1.30]"
    )
    assert Report(steps=7, state="done").verdict() == "left as it was: nothing is kept"
    undone = Report(steps=7, state="undone").verdict()
    assert undone == "no verdict: accel was undone after 7 steps"


def test_verdict_says_what_is_known_where_the_closing_trial_did_not_settle() -> None:
    report = _report()
    report.speedup, report.speedup_low, report.speedup_high = 1.05, 0.99, 1.11
    verdict = report.verdict()
    assert verdict.startswith("at least 0.99x, not settled: 1.05x [0.99, 1.11] as a whole; each alone: channels_last ")


def test_a_profile_shows_what_is_borderline() -> None:
    finding = Finding(
        cause="input.cpu",
        bottleneck="input",
        title="the loader computes",
        why=[],
        remedy="",
        share=0.092,
        predicted=Saving(value=0.08, low=0.07, high=0.09),
    )
    text = " ".join(as_text(ProfileReport(bottleneck="none", verdict="none", borderline=[finding], steps=50)).split())
    assert "borderline: input.cpu, 9 % of the step, 8 % could be saved, too little to call it a cause" in text


def test_verdict_before_the_end_says_so() -> None:
    assert Report(steps=7).verdict() == "no verdict yet: 7 steps seen, the search has not ended"
    words = {"summary": "", "treats": (), "exactness": "exact", "status": "kept"}
    row = StrategyRow(name="allocator", gain=1.2, gain_low=1.1, gain_high=1.3, **words)
    for state, start in (("searching", "no verdict yet"), ("interrupted", "no verdict: the run ended")):
        verdict = Report(steps=7, state=state, rows=[row]).verdict()
        assert verdict.startswith(start)
        assert verdict.endswith(
            "kept in trials of their own, not yet compared as a whole: allocator 1.20x [1.10, 1.30]"
        )
