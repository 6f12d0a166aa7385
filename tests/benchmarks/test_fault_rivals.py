"""Rivals in the fault matrix: each is started as it documents, and judged by what it says first."""

from __future__ import annotations

import ast

import pytest

from benchmarks.faults import runs as fault_runs
from benchmarks.faults.rivals import (
    RIVALS,
    gpuprof_answer,
    instrument,
    traceml_answer,
)
from benchmarks.faults.table import CASES, Case


@pytest.mark.sample(3)
@pytest.mark.parametrize("tool", RIVALS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_copy_for_a_rival_adds_what_its_readme_asks_for(case: Case, tool: str) -> None:
    source = case.script.read_text("utf-8")
    copy = ast.parse(instrument(source, tool))
    blocks = [node for node in ast.walk(copy) if isinstance(node, ast.With)]
    added = [node for node in blocks if ast.unparse(node.items[0].context_expr).startswith(("traceml.", "gpuprof."))]
    assert len(added) == 1
    assert "optimizer.step()" in ast.unparse(added[0])
    assert ("for " in ast.unparse(added[0].body[0])) is (tool == "gpuprof")
    assert len(ast.unparse(copy)) < len(ast.unparse(ast.parse(source))) * 1.4


@pytest.mark.parametrize(
    ("name", "kind", "severity", "summary", "right"),
    [
        ("input_cpu", "INPUT_BOUND", "crit", "Input wait is 70%", True),
        ("outside_periodic", "INPUT_BOUND", "crit", "Input wait is 70%", False),
        ("step_code", "RESIDUAL_HEAVY", "crit", "Residual time is 40%", True),
        ("one_thread", "COMPUTE_BOUND", "info", "Compute-bound; backward is the largest phase.", True),
        ("optimizer_update", "COMPUTE_BOUND", "info", "Compute-bound; optimizer is the largest phase.", True),
        ("optimizer_update", "COMPUTE_BOUND", "info", "Compute-bound; backward is the largest phase.", False),
        ("straggler", "COMPUTE_STRAGGLER", "crit", "", True),
        ("healthy_mlp", "COMPUTE_BOUND", "info", "Compute-bound; backward is the largest phase.", True),
        ("healthy_mlp", "INPUT_BOUND", "warn", "Input wait is 11%", False),
        ("healthy_mlp", "NO_CLEAR_PERFORMANCE_BOTTLENECK", "info", "", True),
    ],
)
def test_traceml_is_judged_by_its_class(name: str, kind: str, severity: str, summary: str, right: bool) -> None:
    told = {"primary_diagnosis": {"kind": kind, "status": kind, "severity": severity, "summary": summary}}
    assert traceml_answer(CASES[name], told).right is right


@pytest.mark.parametrize(
    ("name", "insights", "right"),
    [
        ("input_cpu", [("high", "69% of step time waiting on the loader (inter-step gap)")], True),
        ("outside_logging", [("high", "145% of step time waiting on the loader (inter-step gap)")], False),
        ("outside_checkpoint", [("low", "Step-time p99/p50 = 9.0× — high tail latency")], True),
        ("small_ops", [("low", "12% of step unaccounted (kernel-launch / Python overhead)")], True),
        ("input_cpu", [("low", "Estimated cost: $0.14"), ("low", "No major bottlenecks detected")], False),
        ("healthy_mlp", [("low", "First step 90 ms vs steady-state 9 ms — warmup / JIT compile")], True),
        ("healthy_mlp", [("low", "backward/forward = 2.9× — possible gradient checkpointing recompute")], True),
        ("healthy_mlp", [("low", "Step-time p99/p50 = 3.0×"), ("medium", "Rank skew: rank 1 slower")], False),
    ],
)
def test_gpuprof_is_judged_by_its_first_insight(name: str, insights: list[tuple[str, str]], right: bool) -> None:
    told = [{"severity": severity, "title": title} for severity, title in insights]
    assert gpuprof_answer(CASES[name], told).right is right


def test_rival_that_fails_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_runs, "settle", lambda: None)
    told = fault_runs.consult("gpuprof", CASES["input_storage"], "no-such-python", 12)
    assert not told.right
    assert told.failed.startswith("FileNotFoundError")
