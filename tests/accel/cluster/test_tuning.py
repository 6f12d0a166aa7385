"""Tuning: what Optuna is told of jobs, and that a tuner that was killed goes on."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from accel.cluster.job_table import JobRow, JobSpec, JobTable
from accel.cluster.tuning import ParameterTuner, read_space
from accel.errors import InvalidArgument
from accel.scores import read_scores, report_score

pytest.importorskip("optuna", reason="needs Optuna (pip install -e '.[dev]')")

SPACE = """
trials = {trials}
[parameters]
x = {{ low = -4.0, high = 4.0 }}
layers = {{ low = 1, high = 3 }}
kind = {{ choices = ["a", "b"] }}
"""


class PlayedJobs:
    """Trials whose score at step s is x² + 1/(s + 1), ten steps of them, a step for each look of the tuner."""

    def __init__(self, folder: Path, trials: int = 8, parallel: int = 2) -> None:
        self.folder, self.table, self.parallel = folder, JobTable(folder), parallel
        (folder / "space.toml").write_text(SPACE.format(trials=trials))
        self.said: list[str] = []
        self.steps: dict[str, int] = {}
        self.tuner = self.started()

    def started(self) -> ParameterTuner:
        spec = JobSpec(arguments=("train.py", "--epochs=10"), folder="/", checkpoint=str(self.folder / "jobs"))
        space = read_space(self.folder / "space.toml")
        return ParameterTuner(
            self.table, self.folder, space, spec, "study", parallel=self.parallel, seed=1, say=self.said.append
        )

    def x(self, row: JobRow) -> float:
        return next(float(each[4:]) for each in row.spec.arguments if each.startswith("--x="))

    def ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        while self.tuner.look():
            self.trains(monkeypatch)

    def trains(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for row in self.table.jobs():
            if row.state not in ("waiting", "running"):
                continue
            row.state = "cancelled" if row.is_cancelled else "running"
            step = self.steps.get(row.name, 0)
            if row.state == "running":
                monkeypatch.setenv("ACCEL_CHECKPOINT", row.spec.checkpoint)
                report_score(self.x(row) ** 2 + 1 / (step + 1), step)
                self.steps[row.name] = step + 1
                row.state = "done" if step == 9 else "running"
            self.table.write(row)


def test_trials_are_jobs_and_the_best_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played, most = PlayedJobs(tmp_path), 0
    while played.tuner.look():
        played.trains(monkeypatch)
        most = max(most, sum(row.state in ("waiting", "running") for row in played.table.jobs()))
    rows = played.table.jobs()
    assert len(rows) == 8
    assert most == 2
    assert {"train.py", "--epochs=10"} < set(rows[0].spec.arguments)
    assert any(re.fullmatch(r"--layers=[123]", each) for each in rows[0].spec.arguments)
    assert {row.state for row in rows} == {"done", "cancelled"}  # ASHA has given some up
    best, score = played.tuner.best or ({}, math.inf)
    assert score == min(played.x(row) ** 2 + 0.1 for row in rows if row.state == "done")
    assert best["x"] ** 2 + 0.1 == score
    assert sum(played.steps.values()) < 80
    assert len(played.said) == 8


def test_a_tuner_that_was_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedJobs(tmp_path, trials=5)
    for _ in range(4):
        played.tuner.look()
        played.trains(monkeypatch)
    submit = JobTable.submit
    monkeypatch.setattr(JobTable, "submit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):  # between asking and submitting
        played.ends(monkeypatch)
    monkeypatch.setattr(JobTable, "submit", submit)
    played.tuner = played.started()
    played.ends(monkeypatch)
    assert len(played.table.jobs()) == 5


@pytest.mark.parametrize(("state", "text"), [("failed", "failed: exit status 3"), ("done", "failed: no score")])
def test_a_trial_that_fails_is_not_the_end(state: str, text: str, tmp_path: Path) -> None:
    played = PlayedJobs(tmp_path, trials=2, parallel=1)
    played.tuner.look()
    row = played.table.job("study-0")
    row.state, row.exit_status = state, 3
    played.table.write(row)
    assert played.tuner.look()
    assert played.said[0].startswith(f"study-0: {text}  (x=")
    assert played.tuner.best is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", r"may have direction, trials and \[parameters\]. Found: \['x'\]"),
        ("", r"must have \[parameters\]"),
        ("direction = 'best'\n[parameters]\nx = {choices = [1]}", "direction must be one of"),
        ("trials = 0\n[parameters]\nx = {choices = [1]}", "trials must be"),
        ("[parameters]\nx = {low = 1}", "x must have choices, or low and high"),
        ("[parameters]\nx = {low = 3, high = 1}", "x must be a range"),
        ("[parameters\n", "must be a search space in TOML"),
    ],
)
def test_a_wrong_space_is_refused_in_a_sentence(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        read_space(tmp_path / "space.toml")


def test_scores_of_a_killed_job_are_read_as_far_as_they_are_whole(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("ACCEL_CHECKPOINT", str(tmp_path))
    report_score(3.0, 0)
    with (tmp_path / "scores.jsonl").open("a") as file:
        file.write('{"step": 1, "va\n')
    report_score(2.0, 1)
    report_score(1.0, 1)
    with (tmp_path / "scores.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "value": 0.0})[:-3])
    assert read_scores(tmp_path) == {0: 3.0, 1: 1.0}
    monkeypatch.setenv("RANK", "1")
    report_score(0.0, 9)
    assert len(read_scores(tmp_path)) == 2
    with pytest.raises(InvalidArgument, match="at least 0"):
        report_score(1.0, -1)
