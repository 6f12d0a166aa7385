"""The fault matrix: its scripts are what the table says, and answers are judged as its rules say."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from accel.profiler.report import Finding, ProfileReport, Saving, from_json
from benchmarks import fault_matrix
from benchmarks.faults import rows as fault_rows
from benchmarks.faults import runs as fault_runs
from benchmarks.faults.rows import Answer, Remedy, Timing
from benchmarks.faults.runs import Plan, RunFailed
from benchmarks.faults.table import CASES, CUDA_CASES, HEALTHY, Case
from tests.benchmarks import script_cases
from tests.benchmarks.fault_rows import row
from tests.comm.ranks import run_ranks

FOLDER = Path(fault_matrix.__file__).parent / "faults" / "scripts"
NOT_SCRIPTS = {"__init__", "common"}

FAULT = CASES["input_storage"]
CONTROL = CASES["healthy_mlp"]


def train(case: Case, *options: str) -> str:
    return fault_runs.run([*fault_runs.launch(case), str(case.script), *options])


def timing(seconds: float, samples: int = 8) -> Timing:
    return Timing(steps=20, seconds_per_step=seconds, samples_per_second=samples / seconds)


def finding(cause: str, **fields: Any) -> Finding:
    return Finding(cause=cause, bottleneck=cause.partition(".")[0], title="", why=[], remedy="", **fields)


def report(*causes: str, **fields: Any) -> ProfileReport:
    bottleneck = causes[0].partition(".")[0] if causes else fields.pop("bottleneck", HEALTHY)
    return ProfileReport(bottleneck=bottleneck, findings=[finding(cause) for cause in causes], **fields)


# The table and the scripts


def test_every_script_is_in_the_table_and_vice_versa() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")} - NOT_SCRIPTS
    assert scripts == set(CASES) | set(CUDA_CASES)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_fault_has_a_remedy_and_control_has_none(case: Case) -> None:
    assert bool(case.remedy) is not case.healthy
    assert case.healthy or "." in case.cause


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_script_shadows_no_module_and_imports_nothing_of_ours(case: Case) -> None:
    assert case.name not in sys.stdlib_module_names  # a script's folder comes first on sys.path
    nodes = list(ast.walk(ast.parse(case.script.read_text("utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}
    assert not {name.partition(".")[0] for name in names} & {"accel", "benchmarks", *CASES}


@pytest.mark.parametrize("arguments", [("input_iterator",), ("outside_periodic", "--fixed")], ids=" ".join)
def test_scripts_without_and_with_a_main_print_one_line_of_figures(arguments: tuple[str, ...]) -> None:
    """In a process that has imported torch, where a fresh interpreter takes seconds for it."""
    name, *options = arguments
    (printed,) = run_ranks(script_cases.run_script, 1, str(CASES[name].script), "--steps", "12", *options)
    check_figures(printed)


def check_figures(printed: str) -> None:
    assert len(printed.splitlines()) == 1
    assert set(json.loads(printed)) == {"steps", "seconds_per_step", "samples_per_second"}
    found = fault_runs.timing_of(printed)
    assert found.steps == 12
    assert found.seconds_per_step > 0
    assert found.samples_per_second > 0


# Commands


def test_single_process_is_profiled_by_a_plain_interpreter() -> None:
    command = fault_runs.profile_command(FAULT, 50, Path("out.json"))
    script = str(FAULT.script)
    assert command == [sys.executable, *["-m", "accel", "profile", "--json", "out.json"], script, "--", "--steps", "50"]


def test_ranks_are_started_by_torchrun_with_the_profiler_inside() -> None:
    command = fault_runs.profile_command(CASES["slow_link"], 50, Path("out.json"))
    assert command[1:7] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    assert command[7:9] == ["accel", "profile"]


def test_remedy_is_asked_for_with_fixed() -> None:
    command = fault_runs.script_command(FAULT, 50, fixed=True)
    assert command == [sys.executable, str(FAULT.script), "--steps", "50", "--fixed"]
    assert fault_runs.script_command(FAULT, 50, fixed=False) == command[:-1]


# Judging


@pytest.mark.parametrize(
    ("case", "found", "right"),
    [
        pytest.param(FAULT, report("input.storage"), True, id="the-cause"),
        pytest.param(FAULT, report("input.storage", "optimizer.update"), True, id="the-cause-first"),
        pytest.param(FAULT, report("optimizer.update", "input.storage"), False, id="the-cause-second"),
        pytest.param(FAULT, report("input.cpu"), False, id="the-class-alone"),
        pytest.param(FAULT, report(), False, id="a-fault-missed"),
        pytest.param(FAULT, report(bottleneck="", refused="too few steps"), False, id="a-fault-refused"),
        pytest.param(CONTROL, report(), True, id="healthy"),
        pytest.param(CONTROL, report("compute.bound"), False, id="a-false-alarm"),
        pytest.param(CONTROL, report(bottleneck="", refused="too few steps"), False, id="healthy-refused"),
    ],
)
def test_answer_is_right_if_the_first_cause_is_the_expected_one(case: Case, found: ProfileReport, right: bool) -> None:
    read = from_json(found.to_json())
    assert fault_rows.is_right(case, fault_rows.answer_of(read)) is right


@pytest.mark.parametrize(
    ("found", "right"),
    [
        (report("host.oversubscribed"), True),
        (report("host.oversubscribed", "input.storage"), True),
        (report(bottleneck="", refused="the host is oversubscribed: 2.0 of 2 cores are taken"), True),
        (report("input.storage"), False),
        (report("host.gc"), False),
        (report(), False),
    ],
)
@pytest.mark.parametrize("case", [FAULT, CONTROL], ids=lambda case: case.name)
def test_on_a_busy_host_the_host_is_the_answer(case: Case, found: ProfileReport, right: bool) -> None:
    assert fault_rows.is_right(case, fault_rows.answer_of(found), loaded=True) is right


def test_no_report_is_never_right() -> None:
    assert not fault_rows.is_right(CONTROL, Answer(HEALTHY, HEALTHY, failed="exit status 1"))


def test_answer_holds_the_first_findings_savings() -> None:
    predicted, measured = Saving(value=0.5, low=0.4, high=0.6), Saving(value=0.55, low=0.5, high=0.6)
    first = finding("input.storage", predicted=predicted, measured=measured)
    answer = fault_rows.answer_of(ProfileReport(bottleneck="input", findings=[first, finding("host.gc")]))
    assert (answer.predicted, answer.measured, answer.others) == (predicted, measured, ["host.gc"])
    assert fault_rows.prediction(answer) == measured


def test_saving_is_of_the_step_or_of_the_sample() -> None:
    plain, fixed = [timing(0.010)], [timing(0.020, samples=64)]
    assert fault_rows.saving(plain, fixed, "seconds_per_step") == pytest.approx(-1)
    assert fault_rows.saving(plain, fixed, "samples_per_second") == pytest.approx(0.75)


def test_error_is_that_of_a_right_answer_only() -> None:
    remedy = Remedy([], [], 0.6, 0.5, 0.7)
    answer = Answer("input.storage", predicted=Saving(value=0.55, low=0.5, high=0.6))
    assert fault_rows.error_of(answer, remedy, right=True) == pytest.approx(-0.05)
    assert fault_rows.error_of(answer, remedy, right=False) is None
    assert fault_rows.error_of(answer, None, right=True) is None
    assert fault_rows.error_of(Answer("input.storage"), remedy, right=True) is None


def test_summary_counts_faults_alarms_and_predictions() -> None:
    rows = [
        row("input_cpu", "input.cpu", 0.04, traceml=True),
        row("gc_collect", "outside.step", None, traceml=False),
        row("float64", "compute.float64", -0.2),
        row("healthy_mlp", "none", traceml=False),
        row("healthy_cnn", "memory.bound"),
    ]
    found = fault_rows.summarise(rows)
    assert (found["cases"], found["right"]) == (5, 3)
    assert (found["faults"], found["faults_named"]) == (3, 2)
    assert (found["controls"], found["false_alarms"]) == (2, 1)
    assert (found["predictions"], found["predictions_within"]) == (2, 1)
    assert found["worst_prediction"] == {"case": "float64", "error": -0.2}
    assert found["rivals"] == {"traceml": {"cases": 3, "right": 1, "controls": 1, "false_alarms": 1, "failed": 0}}
    words = fault_matrix.sentence(found)
    assert words.startswith("accel: 3 of 5 right; 1 false alarms on 2 controls; 1 of 2 predictions within 0.10")


def test_profiler_that_fails_is_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> str:
        raise RunFailed("exit status 2: no such command")

    monkeypatch.setattr(fault_runs, "run", run)
    monkeypatch.setattr(fault_runs, "settle", lambda: None)
    found = Plan(remedy=False).examine(FAULT)
    assert found.right is False
    assert found.answer is not None
    assert found.answer.failed == "exit status 2: no such command"
    assert "FAIL" in fault_matrix.one_line(found)
