"""Scripts of the fault matrix that are profiled repeatedly, and what is kept of a record where some are run again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest
from click.testing import CliRunner

from accel.profiler.report import Saving
from benchmarks import fault_matrix
from benchmarks.faults import rows as fault_rows
from benchmarks.faults import runs as fault_runs
from benchmarks.faults.rivals import RivalAnswer
from benchmarks.faults.rows import Answer
from benchmarks.faults.runs import Plan
from benchmarks.faults.table import CASES
from tests.benchmarks.fault_rows import row

FAULT, CONTROL = CASES["input_storage"], CASES["healthy_mlp"]


def stability(quiet: list[str], half_busy: list[str]) -> fault_rows.Stability:
    return fault_rows.Stability(quiet, half_busy)


def test_runs_agree_with_the_commonest_cause_of_the_quiet_machine() -> None:
    seen = stability(["input.cpu"] * 19 + [""], ["input.cpu"] * 17 + ["host.oversubscribed"] * 3)
    assert seen.cause == "input.cpu"
    assert seen.agreeing == (19, 17)
    assert seen.share == pytest.approx(0.85)
    assert seen.others() == {"no verdict": 1, "host.oversubscribed": 3}


@pytest.mark.parametrize(("others", "stable"), [(0, True), (1, True), (2, False)])
def test_nineteen_of_twenty_are_stable(others: int, stable: bool) -> None:
    seen = stability(["input.storage"] * 20, ["input.storage"] * (20 - others) + ["none"] * others)
    assert dataclasses.replace(row("input_storage", "input.storage"), stability=seen).is_stable is stable


@pytest.mark.parametrize(
    ("name", "others", "cores", "cause"),
    [
        ("one_thread", 1, 2, "none"),
        ("one_thread", 2, 4, "none"),
        ("one_thread", 1, 4, ""),
        ("straggler", 1, 2, "host.oversubscribed"),
        ("healthy_ddp", 2, 4, ""),
        ("input_cpu", 1, 2, ""),
    ],
)
def test_what_is_to_be_named_beside_neighbours(name: str, others: int, cores: int, cause: str) -> None:
    assert CASES[name].cause_beside(others, cores) == cause


def test_another_cause_is_right_beside_neighbours() -> None:
    seen = fault_rows.Stability(["compute.threads"] * 2, ["none", "compute.threads"], "none")
    assert (seen.agreeing, seen.share) == ((2, 1), 0.5)
    assert seen.others() == {"compute.threads": 1}
    shown = fault_matrix.agreement(dataclasses.replace(row("one_thread", "compute.threads"), stability=seen))
    assert shown == "2 of 2, half-busy 1 of 2 `none` (compute.threads 1x) ✗"


def test_repeated_runs_are_quiet_and_half_busy_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[int] = []

    @contextlib.contextmanager
    def busy(processes: int) -> Iterator[None]:
        loads.append(processes)
        yield

    monkeypatch.setattr(fault_runs, "busy", busy)
    monkeypatch.setattr(fault_runs, "settle", lambda: None)
    monkeypatch.setattr(fault_runs, "usable_cores", lambda: 4)
    monkeypatch.setattr(fault_runs, "profile", lambda case, steps: Answer(f"{loads[-1]} busy"))
    found = fault_runs.repeated(FAULT, 50, 3)
    assert loads == [0, 2] * 3
    assert (found.quiet, found.half_busy) == (["0 busy"] * 3, ["2 busy"] * 3)
    assert found.date == date.today().isoformat()
    assert found.machine.startswith("cpu")


def test_repeated_runs_have_a_date_and_a_machine_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rest of the record keeps its own: it was measured then and there."""
    monkeypatch.setattr("benchmarks.record.FOLDER", tmp_path)
    seen = stability(["none"] * 2, ["none"] * 2)
    answered = dataclasses.replace(row("healthy_mlp", "none"), answer=Answer("none", step_ms=1.0))
    fault_matrix._record([answered], fault_runs.Plan(remedy=False), ())
    (path,) = tmp_path.iterdir()
    before = json.loads(path.read_text()) | {"date": "2026-01-02", "machine": "cpu (old)", "rivals_date": "2026-01-01"}
    path.unlink()
    (tmp_path / "fault-matrix-cpu-2026-01-02.json").write_text(json.dumps(before))

    again = dataclasses.replace(seen, date="2026-03-04", machine="cpu (new)")
    rows = [dataclasses.replace(row("healthy_mlp", "none"), stability=again)]
    fault_matrix._record(rows, fault_runs.Plan(remedy=False, repeats=2), ("healthy_mlp",))

    (path,) = tmp_path.iterdir()
    held = json.loads(path.read_text())
    assert (path.name, held["machine"]) == ("fault-matrix-cpu-2026-01-02.json", "cpu (old)")
    assert held["cases"][0]["answer"]["step_ms"] == 1.0  # of the day and the machine that stand over the table
    assert "Profiled repeatedly: 1 on 2026-03-04, cpu (new)." in fault_matrix.table_block(held)


def test_agreement_is_a_column_and_too_little_of_it_ends_the_command_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stability(["input.storage"] * 2, ["input.storage", "none"])
    found = dataclasses.replace(row("input_storage", "input.storage"), stability=seen)
    monkeypatch.setattr(Plan, "examine", lambda plan, case: found)
    done = CliRunner().invoke(fault_matrix.main, ["input_storage", "--no-remedy", "--stability", "2"])
    assert done.exit_code == 1
    assert "2 of 2, half-busy 1 of 2 (none 1x) ✗" in done.output
    assert "0 of 1 stable, least 50% (input_storage)" in done.output


def test_agreement_is_recorded_and_stays_beside_cases_that_are_run_again() -> None:
    seen = stability(["input.storage"] * 2, ["input.storage"] * 2)
    old = dataclasses.replace(row("input_storage", "input.storage"), stability=seen)
    (again,) = fault_rows.merged(json.loads(json.dumps([dataclasses.asdict(old)])), [row("input_storage", "none")])
    assert (again.stability, again.right) == (seen, False)
    held = {"cases": [dataclasses.asdict(old)], "summary": fault_rows.summarise([old]), "pairs": 2}
    block = fault_matrix.table_block({"date": "", "command": "", "machine": "", "torch": "", **held})
    assert "| script | accel says | same first cause |" in block
    assert "2 of 2, half-busy 2 of 2" in block


def test_stability_brings_its_own_load() -> None:
    done = CliRunner().invoke(fault_matrix.main, ["--stability", "2", "--loaded"])
    assert done.exit_code == 2
    assert "leave out --loaded" in " ".join(done.output.replace("│", " ").split())


def test_cases_run_again_replace_their_recorded_rows_and_keep_what_was_not_asked() -> None:
    timing = fault_rows.Timing(260, 0.02, 100.0)
    fixed = fault_rows.Timing(260, 0.01, 200.0)
    remedy = fault_rows.remedy_of([timing] * 2, [fixed] * 2, "seconds_per_step")
    told = fault_rows.Answer("input.storage", "input", predicted=Saving(value=0.45, low=0.4, high=0.5))
    rivals = {"traceml": RivalAnswer("INPUT-BOUND", True)}
    old = fault_rows.Row(FAULT, told, True, remedy, fault_rows.error_of(told, remedy, right=True), rivals)
    control = fault_rows.Row(CONTROL, fault_rows.Answer("none", "none"), True, None, None, {})
    again = fault_rows.Row(FAULT, told, False, None, None, {})
    recorded = json.loads(json.dumps([dataclasses.asdict(row) for row in (old, control)]))

    assert fault_rows.merged(recorded, []) == [old, control]
    assert fault_rows.merged(recorded, [again]) == [dataclasses.replace(again, rivals=rivals), control]
    right = dataclasses.replace(again, right=True, stability=stability(["input.storage"], ["none"]))
    assert fault_rows.merged(recorded, [right]) == [dataclasses.replace(old, stability=right.stability), control]
    wrong = json.loads(json.dumps([dataclasses.asdict(dataclasses.replace(old, right=False))]))
    assert fault_rows.merged(wrong, [right]) == [dataclasses.replace(right, rivals=rivals)]
    other = dataclasses.replace(right, script="another version")
    assert fault_rows.merged(recorded, [other]) == [dataclasses.replace(other, rivals=rivals), control]
