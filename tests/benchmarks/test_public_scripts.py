"""Public scripts: what counts as the same result, why nothing was won, and the data that they read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import public_scripts
from benchmarks.public.scripts import COMMITS, SCRIPTS, PublicScript
from benchmarks.public_scripts import Ending, compare
from benchmarks.record import header

PLAIN = Ending(0, "loss 0.5\n", {"model.pt": "aa"}, 10.0, "")


def test_ten_scripts_and_more_each_at_one_commit() -> None:
    assert len(SCRIPTS) >= 10
    assert {script.repo for script in SCRIPTS.values()} == COMMITS.keys()
    assert all(len(commit) == 40 for commit in COMMITS.values())


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (PLAIN, ""),
        (replace(PLAIN, seconds=3.0, said="accel: 1.2x"), ""),
        (replace(PLAIN, files={"model.pt": "aa", "out/train.log": "bb"}), ""),
        (replace(PLAIN, status=1), "exit status 1, plainly 0"),
        (replace(PLAIN, output="loss 0.6\n"), "output: 'loss 0.6', plainly 'loss 0.5'"),
        (replace(PLAIN, output=""), "output: 'the number of lines', plainly ''"),
        (replace(PLAIN, files={"model.pt": "bb"}), "files: model.pt"),
        (replace(PLAIN, files={}), "files: model.pt"),
    ],
)
def test_a_result_is_exit_status_output_and_files(other: Ending, difference: str) -> None:
    assert PLAIN.differs(other) == difference


def test_why_nothing_was_won(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    said = "warning\naccel: nothing was made faster: no step of a torch optimizer was seen (0 batches)\n"
    assert public_scripts._why(report, said) == "no step of a torch optimizer was seen (0 batches)"
    rows = [{"name": "allocator", "status": "kept", "gain": 1.2}, {"name": "threads", "status": "undone", "gain": 0.6}]
    report.write_text(json.dumps({"rows": rows}))
    assert public_scripts._why(report, said) == "allocator"
    report.write_text(json.dumps({"rows": rows[1:]}))
    assert public_scripts._why(report, said) == "nothing: threads 0.60x"
    rows = [{"name": "allocator", "status": "not tried", "gain": None}]
    report.write_text(json.dumps({"rows": rows, "state": "interrupted"}))
    assert public_scripts._why(report, said) == "nothing: the run ended before anything was tried"
    report.write_text(json.dumps({"rows": rows, "state": "done"}))
    assert public_scripts._why(report, said) == "nothing: what applies would gain too little"


def test_a_script_that_fails_plainly_is_no_match(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed = replace(PLAIN, status=1, said="Traceback\nOSError: no such data\n")
    monkeypatch.setattr(public_scripts, "run", lambda *_: failed)
    with pytest.raises(public_scripts.ScriptFailed, match="mnist fails plainly, with status 1: OSError: no such data"):
        compare("mnist", tmp_path, 2)


def test_long_runs_scale_their_numbers_and_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs: list[tuple[tuple[str, ...], bool]] = []

    def run(script: PublicScript, source: Path, options: list[str] | None, scratch: Path) -> Ending:
        runs.append((script.arguments, options is not None))
        return replace(PLAIN, seconds=10.0 if options is None else 8.0, step_s=0.3 if options is None else 0.2)

    monkeypatch.setattr(public_scripts, "run", run)
    row = public_scripts.compare_long("mnist", tmp_path, 2, 60.0)
    assert runs[0][0][-2:] == ("--epochs", "8")
    assert [(arguments[-2:], accelerated) for arguments, accelerated in runs[1:]] == [
        (("--epochs", "48"), accelerated) for accelerated in (False, True, True, False)
    ]
    assert (row["first"], row["step"]) == (pytest.approx(1.25), pytest.approx(1.5))
    runs.clear()
    public_scripts.compare_long("mnist", tmp_path, 2, 10.0)  # as long as it is: that run was the first plain one
    assert [accelerated for _, accelerated in runs] == [False, True, True, False]
    assert "geometric mean of 1 scripts 1.25x" in public_scripts.LONG.block({"rows": [row], **header("", "a command")})
