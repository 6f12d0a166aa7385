"""The rivals of `accel profile`: TraceML and gpuprof, run as their own README shows and judged by the class they name.

They live in an environment of their own, whose interpreter the fault matrix is given:

    python -m venv rivals
    rivals/bin/pip install torch traceml-ai "gpuprof[host,torch]"

Neither instruments a plain loop by itself, so each gets a copy of the script with what its README asks for, no more:
TraceML `traceml.init(mode="auto")` and `with traceml.trace_step(model)` around the loop's body up to the optimizer's
step (and `wrap_dataloader_fetch` around an iterator that is no DataLoader), started by `traceml run`; gpuprof
`with gpuprof.profile(...)` around the whole loop, in its automatic mode.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.table import Case

Run = Callable[[Sequence[str], Path], str]
"""Runs a command in a folder and returns what it printed."""

# What a rival says → the classes of causes that it can mean, in its favour where its documentation leaves it open.
# A rival is right about a fault if the class is among them, and about a control if it does not warn.
TRACEML: dict[str, frozenset[str]] = {
    "INPUT_BOUND": frozenset({"input"}),
    "H2D_BOUND": frozenset({"transfer"}),
    # "Logging, checkpointing, validation, CPU stalls, or unobserved work"
    "RESIDUAL_HEAVY": frozenset({"outside", "host"}),
    # "Model compute, mixed precision, batch size, or deeper profiling"; said of healthy runs too, as information
    "COMPUTE_BOUND": frozenset({"compute", "memory", "launch"}),
    "INPUT_STRAGGLER": frozenset({"straggler"}),
    "COMPUTE_STRAGGLER": frozenset({"straggler"}),
    "H2D_STRAGGLER": frozenset({"straggler"}),
    # "Inspect synchronization, collectives, and unattributed work"
    "STRAGGLER": frozenset({"straggler", "communication"}),
}
TRACEML_OPTIMIZER = frozenset({"optimizer"})
"""COMPUTE_BOUND with the optimizer as the largest phase."""

# The first pattern found in an insight's title counts. None: a remark that is no bottleneck, such as the warm-up.
GPUPROF: tuple[tuple[str, frozenset[str] | None], ...] = (
    (r"waiting on the loader|Prefetch queue|Dataloader|Cold-cache|Cache thrashing", frozenset({"input"})),
    (r"kernel-launch / Python overhead", frozenset({"launch", "host"})),
    (r"NCCL comm", frozenset({"communication"})),
    (r"Rank skew|is late on", frozenset({"straggler"})),
    # "logging/checkpoint every N steps, Python GC pauses, or dataloader workers getting scheduled off"
    (r"p99/p50", frozenset({"outside", "host"})),
    (r"MFU|arithmetic intensity|unfused|Kernel drift|thermal", frozenset({"compute", "memory"})),
    (r"gradient checkpointing|grad_checkpoint", frozenset({"compute"})),
    (r"PCIe", frozenset({"transfer"})),
    (r"Peak memory|Host memory pressure", frozenset()),
    (r"warmup|first step|Step 0|cost|Regression|No major|No rank skew", None),
)
SEVERITIES = ("high", "medium", "low")


@dataclass(frozen=True)
class RivalAnswer:
    """What a rival says of a case."""

    verdict: str
    """In its words, '' if it failed."""
    right: bool
    failed: str = ""
    """Why it gave no answer."""


def is_right(case: Case, classes: frozenset[str], *, warned: bool) -> bool:
    """Tell whether a verdict is right: of a fault by its class, of a control by the absence of a warning."""
    return not warned if case.healthy else case.bottleneck in classes


# --- The copy of the script ------------------------------------------------------------------------------------------


def instrument(source: str, tool: str) -> str:
    """Return a training script with what the tool's README asks for."""
    tree = ast.parse(source)
    lines = source.splitlines()
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While) and _updates(node)]
    outer, inner = loops[0], loops[-1]  # ast.walk goes from the outside in
    if tool == "gpuprof":
        _wrap(lines, outer, outer, 'with gpuprof.profile("case", db_path="gpuprof.db", summary=False):')
        added = ["import gpuprof"]
    else:
        update = next(statement for statement in inner.body if _updates(statement))
        if isinstance(inner, ast.For) and not (isinstance(inner.iter, ast.Name) and inner.iter.id == "loader"):
            _call(lines, inner.iter, "traceml.wrap_dataloader_fetch")
        _wrap(lines, inner.body[0], update, "with traceml.trace_step(model):")
        added = ["import traceml_ai as traceml", 'traceml.init(mode="auto")']
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    last = imports[-1].end_lineno
    assert last is not None
    return "\n".join([*lines[:last], *added, *lines[last:], ""])


def _updates(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Call) and ast.unparse(inner.func) == "optimizer.step" for inner in ast.walk(node))


def _wrap(lines: list[str], first: ast.stmt, last: ast.stmt, header: str) -> None:
    """Indent the lines from one statement to another under a new header; the number of lines stays what it was."""
    assert last.end_lineno is not None
    at = first.lineno - 1
    for number in range(at, last.end_lineno):
        lines[number] = f"    {lines[number]}" if lines[number] else ""
    lines[at] = f"{' ' * first.col_offset}{header}\n{lines[at]}"


def _call(lines: list[str], expression: ast.expr, function: str) -> None:
    assert expression.end_col_offset is not None
    at, begin, end = expression.lineno - 1, expression.col_offset, expression.end_col_offset
    lines[at] = f"{lines[at][:begin]}{function}({lines[at][begin:end]}){lines[at][end:]}"


# --- TraceML ---------------------------------------------------------------------------------------------------------


def traceml_command(case: Case, python: str, steps: int) -> list[str]:
    """Return how TraceML is started in the folder of the copy."""
    ranks = [] if case.ranks == 1 else [f"--nproc-per-node={case.ranks}"]
    launcher = str(Path(python).parent / "traceml")
    return [launcher, "run", case.script.name, "--run-name", "case", *ranks, "--args", "--steps", str(steps)]


def traceml_answer(case: Case, summary: dict[str, Any]) -> RivalAnswer:
    """Judge TraceML's final summary."""
    found = summary["primary_diagnosis"]
    kind, severity = str(found["kind"]), str(found.get("severity"))
    classes = TRACEML.get(kind, frozenset())
    verdict = str(found.get("status") or kind)
    if kind == "COMPUTE_BOUND" and "optimizer" in str(found.get("summary", "")).lower():
        classes, verdict = TRACEML_OPTIMIZER, f"{verdict}, optimizer largest"
    return RivalAnswer(verdict, is_right(case, classes, warned=severity in ("warn", "crit")))


def _ask_traceml(case: Case, python: str, steps: int, folder: Path, run: Run) -> RivalAnswer:
    run(traceml_command(case, python, steps), folder)
    return traceml_answer(case, json.loads((folder / "logs" / "case" / "final_summary.json").read_text("utf-8")))


# --- gpuprof ---------------------------------------------------------------------------------------------------------


def gpuprof_command(case: Case, python: str, steps: int) -> list[str]:
    """Return how the copy for gpuprof is started: plainly, as its README does."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
    return [python, *(ranks if case.ranks > 1 else []), case.script.name, "--steps", str(steps)]


def gpuprof_answer(case: Case, insights: Sequence[dict[str, Any]]) -> RivalAnswer:
    """Judge gpuprof's insights by the first of the highest severity that names a bottleneck.

    A control counts as warned about if that is of medium or high severity.
    """
    told = [(insight, _gpuprof_classes(str(insight["title"]))) for insight in insights]
    named = [(insight, classes) for insight, classes in told if classes is not None]
    named.sort(key=lambda pair: SEVERITIES.index(pair[0]["severity"]))
    if not named:
        return RivalAnswer("nothing", is_right(case, frozenset(), warned=False))
    insight, classes = named[0]
    verdict = f"[{str(insight['severity']).upper()}] {insight['title']}"
    return RivalAnswer(verdict, is_right(case, classes, warned=insight["severity"] != "low"))


def _gpuprof_classes(title: str) -> frozenset[str] | None:
    return next((classes for pattern, classes in GPUPROF if re.search(pattern, title)), frozenset())


def _ask_gpuprof(case: Case, python: str, steps: int, folder: Path, run: Run) -> RivalAnswer:
    run(gpuprof_command(case, python, steps), folder)
    insights: list[dict[str, Any]] = []
    for which in _gpuprof_reports(folder / "gpuprof.db"):
        printed = run([python, "-m", "gpuprof", "insights", "gpuprof.db", *which, "--json"], folder)
        insights += json.loads(printed)["insights"]
    return gpuprof_answer(case, insights)


def _gpuprof_reports(database: Path) -> Iterator[list[str]]:
    """Yield the arguments of each report to ask for: that of the whole group first, then that of its first rank."""
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT id, group_id FROM runs ORDER BY rank, id").fetchall()
    number, group = rows[0]
    if group and len(rows) > 1:
        yield ["--group", str(group)]
    yield [str(number)]


# --- Both ------------------------------------------------------------------------------------------------------------

RIVALS: dict[str, Callable[[Case, str, int, Path, Run], RivalAnswer]] = {
    "traceml": _ask_traceml,
    "gpuprof": _ask_gpuprof,
}


def ask(tool: str, case: Case, python: str, steps: int, run: Run) -> RivalAnswer:
    """Let a rival profile a copy of the case's script in a folder of its own and return its answer."""
    with tempfile.TemporaryDirectory() as folder:
        for sibling in case.script.parent.glob("common.py"):
            shutil.copy(sibling, folder)
        copy = Path(folder) / case.script.name
        copy.write_text(instrument(case.script.read_text("utf-8"), tool), "utf-8")
        return RIVALS[tool](case, python, steps, Path(folder), run)
