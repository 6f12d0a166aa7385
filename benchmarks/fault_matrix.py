"""The fault matrix: does `accel profile` name what was done to a script, and foresee what undoing it saves?

    python -m benchmarks.fault_matrix [CASE …] [--tools accel,traceml,gpuprof] [--no-remedy] [--loaded] [--record]

Each case of benchmarks/faults/table.py is profiled in a fresh process, as a user would. Then the script runs as it is
and with its remedy, in turns A B B A of fresh processes, and the saving is compared with the one the report predicted.
With --loaded every core is kept busy meanwhile, and the right answer to every case is that the host is oversubscribed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from accel.files import write_atomic
from accel.profiler.diagnose.causes import OVERSUBSCRIBED
from accel.profiler.report import Saving
from benchmarks.faults.rivals import RIVALS, RivalAnswer
from benchmarks.faults.rows import TOLERANCE, Answer, Row, merged, summarise
from benchmarks.faults.runs import PAIRS, Plan
from benchmarks.faults.table import CASES, Case

WIDTH = 200
"""Columns of the table, whatever the terminal has: a row cut into pieces can't be read."""


@click.command()
@click.argument("cases", nargs=-1, metavar="[CASE]…")
@click.option("--tools", default="accel", show_default=True, help="Of accel, traceml and gpuprof, with commas.")
@click.option("--rivals-python", metavar="PATH", help="Interpreter of an environment with traceml-ai and gpuprof.")
@click.option("--steps", default=260, show_default=True, help="Training steps of each run.")
@click.option("--no-remedy", is_flag=True, help="Do not try the remedies.")
@click.option("--loaded", is_flag=True, help="Keep every core busy during each profile.")
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(
    cases: tuple[str, ...],
    tools: str,
    rivals_python: str | None,
    steps: int,
    no_remedy: bool,
    loaded: bool,
    record: bool,
) -> None:
    """Profile CASES (default: all) and compare the answers with what was done to them."""
    asked = tuple(tool.strip() for tool in tools.split(",") if tool.strip())
    _check(cases, asked, rivals_python)
    plan = Plan(tools=asked, steps=steps, remedy=not no_remedy, loaded=loaded, rivals_python=rivals_python)
    console = Console(highlight=False, soft_wrap=True, width=WIDTH)
    rows = []
    for name in cases or CASES:
        row = plan.examine(CASES[name])
        rows.append(row)
        console.print(one_line(row, loaded=loaded), markup=False)
    console.print(table(rows, loaded=loaded))
    summary = summarise(rows)
    console.print(sentence(summary), markup=False)
    if record:
        folder, title = Path(__file__).parent / "results", _title(loaded)
        target = folder / f"{title}-cpu-{date.today().isoformat()}.json"
        found = _record(rows, summary, plan)
        if cases and (earlier := sorted(folder.glob(f"{title}-cpu-*.json"))):
            held = json.loads(earlier[-1].read_text(encoding="utf-8"))
            rows = merged(held["cases"], rows)
            again = sorted({*held.get("again", []), *cases})
            found = {**_record(rows, summarise(rows), plan), "command": held["command"], "again": again}
            if not set(asked) & set(RIVALS):
                found["rivals_date"] = held.get("rivals_date", held["date"])
        write_atomic(target, json.dumps(found, indent=1) + "\n")
        console.print(f"recorded in {target.name}")
    if any(row.right is False for row in rows):
        sys.exit(1)


def _check(cases: Sequence[str], tools: Sequence[str], rivals_python: str | None) -> None:
    unknown = [name for name in cases if name not in CASES]
    if unknown:
        raise click.BadParameter(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    known = ("accel", *RIVALS)
    if wrong := [tool for tool in tools if tool not in known]:
        raise click.BadParameter(f"--tools must be of {', '.join(known)}. Found: {', '.join(wrong)}")
    if rivals_python is None and set(tools) & set(RIVALS):
        raise click.UsageError("rivals are run by an interpreter of their own; give it with --rivals-python PATH")


def one_line(row: Row, *, loaded: bool = False) -> str:
    """Return a case's outcome as it comes in."""
    mark = {None: "-   ", True: "ok  ", False: "FAIL"}[row.right]
    answer = "" if row.answer is None else shown(row.answer)
    rivals = "".join(f"; {name}: {told.verdict or told.failed}" for name, told in row.rivals.items())
    return f"{mark} {row.case.name:24} expected {expected(row.case, loaded)}, got {answer or 'nothing'}{rivals}"


def expected(case: Case, loaded: bool) -> str:
    """Return the answer to give."""
    return OVERSUBSCRIBED if loaded else case.cause


def shown(answer: Answer) -> str:
    """Return the answer in a few words."""
    if answer.failed:
        return f"failed: {answer.failed}"
    return answer.cause or f"refused: {answer.refused}"


def table(rows: Sequence[Row], *, loaded: bool = False) -> Table:
    """Lay the matrix out."""
    rivals = [name for name in RIVALS if any(name in row.rivals for row in rows)]
    made = Table("case", "expected", "accel", "predicted", "experiment", "remedy saved", "error", *rivals, box=None)
    for row in rows:
        answer = row.answer
        made.add_row(
            row.case.name,
            expected(row.case, loaded),
            "" if answer is None else f"{'' if row.right else '✗ '}{shown(answer)[:40]}",
            _share(answer.predicted if answer else None),
            _share(answer.measured if answer else None),
            _saved(row),
            "" if row.error is None else f"{row.error:+.2f}{'' if abs(row.error) <= TOLERANCE else ' ✗'}",
            *(_rival_cell(row.rivals.get(name)) for name in rivals),
        )
    return made


def _share(found: Saving | None) -> str:
    return "" if found is None else f"{found.value:.0%}"


def _saved(row: Row) -> str:
    if row.remedy is None:
        return "failed" if row.remedy_failed else ""
    return f"{row.remedy.saving:.0%} [{row.remedy.low:.0%}, {row.remedy.high:.0%}]"


def _rival_cell(told: RivalAnswer | None) -> str:
    if told is None:
        return ""
    return f"{'' if told.right else '✗ '}{(told.verdict or 'failed')[:40]}"


def sentence(summary: dict[str, Any]) -> str:
    """Return the summary in words."""
    worst = summary["worst_prediction"]
    parts = [
        f"accel: {summary['right']} of {summary['cases']} right",
        f"{summary['false_alarms']} false alarms on {summary['controls']} controls",
        f"{summary['predictions_within']} of {summary['predictions']} predictions within {TOLERANCE:.2f}",
    ]
    if worst is not None:
        parts.append(f"worst {worst['error']:+.2f} ({worst['case']})")
    for name, found in summary["rivals"].items():
        alarms = f"{found['false_alarms']} false alarms on {found['controls']} controls"
        parts.append(f"{name}: {found['right']} of {found['cases']} right, {alarms}, {found['failed']} failed")
    return "; ".join(parts)


def _title(loaded: bool) -> str:
    return "fault-matrix-loaded" if loaded else "fault-matrix"


def _record(rows: Sequence[Row], summary: dict[str, Any], plan: Plan) -> dict[str, Any]:
    import torch

    from accel.report.journal import machine_name

    options = [f"--tools {','.join(plan.tools)}", f"--steps {plan.steps}"]
    options += ["--loaded"] if plan.loaded else []
    options += ["--rivals-python PATH"] if plan.rivals_python else []
    return {
        "what": "the cause accel profile names in scripts with one fault each, and predicted against real saving",
        "command": f"python -m benchmarks.fault_matrix {' '.join(options)}",
        "date": date.today().isoformat(),
        "machine": machine_name(torch.device("cpu")),
        "torch": torch.__version__,
        "tolerance": TOLERANCE,
        "pairs": PAIRS,
        "loaded": plan.loaded,
        "summary": summary,
        "cases": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    main()
