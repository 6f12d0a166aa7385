"""Scripts of the fault matrix that are profiled repeatedly, and what is kept of a record where some are run again."""

from __future__ import annotations

import dataclasses
import json

import pytest

from accel.profiler.report import Saving
from benchmarks import fault_matrix
from benchmarks.faults import rows as fault_rows
from benchmarks.faults.rivals import RivalAnswer
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


def test_agreement_is_recorded_and_stays_beside_cases_that_are_run_again() -> None:
    seen = stability(["input.storage"] * 2, ["input.storage"] * 2)
    old = dataclasses.replace(row("input_storage", "input.storage"), stability=seen)
    (again,) = fault_rows.merged(json.loads(json.dumps([dataclasses.asdict(old)])), [row("input_storage", "none")])
    assert (again.stability, again.right) == (seen, False)
    held = {"cases": [dataclasses.asdict(old)], "summary": fault_rows.summarise([old]), "pairs": 2}
    block = fault_matrix.table_block({"date": "", "command": "", "machine": "", "torch": "", **held})
    assert "| script | accel says | same first cause |" in block
    assert "2 of 2, half-busy 2 of 2" in block


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
