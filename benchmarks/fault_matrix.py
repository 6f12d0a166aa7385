"""The fault matrix: does `accel profile` name what was done to a script, and predict what undoing it saves?

    python -m benchmarks.fault_matrix [CASE …] [--tools accel,traceml,gpuprof] [--no-remedy] [--loaded] [--record]
    python -m benchmarks.fault_matrix [CASE …] --no-remedy --stability 20 [--record]

Each case of benchmarks/faults/table.py is profiled in a fresh process, as a user would. Then the script runs as it is
and with its remedy, in turns A B B A of fresh processes, and the saving is compared with the one the report predicted.
With --loaded every core is kept busy meanwhile, and the right answer to every case is that the host is oversubscribed.
With --stability N each case is profiled N times on a quiet machine and N times beside processes that keep half of the
cores busy; the column shows how many of the runs named the same first cause.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from accel.profiler.diagnose.causes import OVERSUBSCRIBED
from accel.profiler.report import Saving
from benchmarks.faults.rivals import RIVALS, RivalAnswer
from benchmarks.faults.rows import TOLERANCE, Answer, Row, merged, row_of, summarise
from benchmarks.faults.runs import PAIRS, Plan
from benchmarks.faults.table import CASES, Case
from benchmarks.record import header, newest, save
from benchmarks.render import SOURCE, Cell, block
from benchmarks.render import table as markdown

WIDTH = 200
"""Columns of the table, whatever the terminal has: a row cut into pieces can't be read."""


@click.command()
@click.argument("cases", nargs=-1, metavar="[CASE]…")
@click.option("--tools", default="accel", show_default=True, help="Of accel, traceml and gpuprof, with commas.")
@click.option("--rivals-python", metavar="PATH", help="Interpreter of an environment with traceml-ai and gpuprof.")
@click.option("--steps", default=260, show_default=True, help="Training steps of each run.")
@click.option("--no-remedy", is_flag=True, help="Do not try the remedies.")
@click.option("--loaded", is_flag=True, help="Keep every core busy during each profile.")
@click.option(
    "--stability", metavar="N", default=0, help="Profile N times more, quiet and half-busy: same first cause?"
)
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(
    cases: tuple[str, ...],
    tools: str,
    rivals_python: str | None,
    steps: int,
    no_remedy: bool,
    loaded: bool,
    stability: int,
    record: bool,
) -> None:
    """Profile CASES (default: all) and compare the answers with what was done to them."""
    asked = tuple(tool.strip() for tool in tools.split(",") if tool.strip())
    _check(cases, asked, rivals_python)
    if stability and loaded:
        raise click.UsageError("--stability loads half of the cores itself; leave out --loaded")
    plan = Plan(
        tools=asked,
        steps=steps,
        remedy=not no_remedy,
        loaded=loaded,
        rivals_python=rivals_python,
        repeats=stability,
    )
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
        console.print(f"recorded in {_record(rows, plan, cases).name}")
    if any(row.right is False or not row.is_stable for row in rows):
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
    again = f"; again: {agreement(row)}" if row.stability else ""
    return f"{mark} {row.case.name:24} expected {expected(row.case, loaded)}, got {answer or 'nothing'}{again}{rivals}"


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
    columns = ("case", "expected", "accel", "same cause", "predicted", "experiment", "remedy saved", "error")
    made = Table(*columns, *rivals, box=None)
    for row in rows:
        answer = row.answer
        made.add_row(
            row.case.name,
            expected(row.case, loaded),
            "" if answer is None else f"{'' if row.right else '✗ '}{shown(answer)[:40]}",
            agreement(row),
            _share(answer.predicted if answer else None),
            _share(answer.measured if answer else None),
            _saved(row),
            "" if row.error is None else f"{row.error:+.2f}{'' if abs(row.error) <= TOLERANCE else ' ✗'}",
            *(_rival_cell(row.rivals.get(name)) for name in rivals),
        )
    return made


def agreement(row: Row) -> str:
    """Return how many of the repeated runs named the same first cause, quiet and half-busy; '' if there were none."""
    if row.stability is None:
        return ""
    seen = row.stability
    quiet, half_busy = (
        f"{count} of {len(causes)}" for count, causes in zip(seen.agreeing, (seen.quiet, seen.half_busy), strict=True)
    )
    half_busy += f" `{seen.beside}`" if seen.beside else ""
    others = ", ".join(f"{cause} {count}x" for cause, count in seen.others().items())
    return f"{quiet}, half-busy {half_busy}" + (f" ({others})" if others else "") + ("" if row.is_stable else " ✗")


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
    if stability := summary.get("stability"):
        least = stability["worst"]
        parts.append(
            f"{stability['stable']} of {stability['cases']} stable, least {least['share']:.0%} ({least['case']})"
        )
    for name, found in summary["rivals"].items():
        alarms = f"{found['false_alarms']} false alarms on {found['controls']} controls"
        parts.append(f"{name}: {found['right']} of {found['cases']} right, {alarms}, {found['failed']} failed")
    return "; ".join(parts)


def _record(rows: Sequence[Row], plan: Plan, cases: Sequence[str]) -> Path:
    """Write the rows; those of some cases beside the others recorded before."""
    name = "fault-matrix-loaded" if plan.loaded else "fault-matrix"
    options = [f"--tools {','.join(plan.tools)}", f"--steps {plan.steps}"]
    options += ["--loaded"] if plan.loaded else []
    options += [f"--stability {plan.repeats}"] if plan.repeats else []
    options += ["--rivals-python PATH"] if plan.rivals_python else []
    command = f"python -m benchmarks.fault_matrix {' '.join(options)}"
    what = "the cause accel profile names in scripts with one fault each, and predicted against real saving"
    figures = {"tolerance": TOLERANCE, "pairs": PAIRS, "loaded": plan.loaded}
    more: dict[str, Any] = {}
    if cases and (before := newest(name)):
        rows, command = merged(before["cases"], rows), before["command"]
        more["again"] = sorted({*before.get("again", []), *cases})
        if not set(plan.tools) & set(RIVALS):
            more["rivals_date"] = before.get("rivals_date", before["date"])
        if plan.repeats and not plan.remedy:  # the repeated runs have a date and a machine of their own
            more |= {about: before[about] for about in ("date", "machine", "cores", "torch")}
            if set(plan.tools) & set(RIVALS):
                more["rivals_date"] = header(what, command)["date"]
    cases_and_summary = {"summary": summarise(rows), "cases": [asdict(row) for row in rows]}
    return save(name, {**header(what, command), **figures, **cases_and_summary, **more})


def table_block(result: dict[str, Any]) -> str:
    """Return the fault matrix."""
    summary, rivals = result["summary"], result["summary"]["rivals"]
    rivals_date = result.get("rivals_date", result["date"])
    when = "{date}" if rivals_date == result["date"] else f"{{date}} ({' and '.join(rivals)}: {rivals_date})"
    head = SOURCE.replace("{date}", when) + (
        ". Saved: share of a step's (or sample's) time, as predicted or found by experiment, and by the remedy itself, "
        "{pairs} interleaved pairs of fresh processes."
    )
    head += _repeated_on(result)
    verdicts = [{"name": "accel", **summary}, *({"name": name, **of_rival} for name, of_rival in rivals.items())]
    columns: dict[str, Cell] = {
        "": "{name}",
        "right": "{right} of {cases}",
        f"false alarms on {summary['controls']} healthy scripts": "{false_alarms}",
    }
    repeated = any(case.get("stability") for case in result["cases"])
    cases: dict[str, Cell] = {
        "script": "{case[name]}",
        "accel says": _said,
        **({"same first cause": _agreement} if repeated else {}),
        "accel: saves": _saves,
        "the remedy saved": _remedy_saved,
        **{name: lambda case, name=name: _rival(case["rivals"][name]) for name in rivals},  # type: ignore[misc]
    }
    return "\n".join([block(head.format_map(result), columns, verdicts), "", *markdown(cases, result["cases"])])


def _repeated_on(result: dict[str, Any]) -> str:
    """Say when and on what scripts were profiled repeatedly; '' if none was."""
    seen = [case["stability"] for case in result["cases"] if case.get("stability")]
    whole = result["date"], result["machine"]
    scripts = Counter((held.get("date") or whole[0], held.get("machine") or whole[1]) for held in seen)
    said = ", ".join(f"{count} on {day}, {machine}" for (day, machine), count in sorted(scripts.items()))
    return f" Profiled repeatedly: {said}." if said else ""


def _said(case: dict[str, Any]) -> str:
    cause = case["answer"]["cause"]
    return (f"`{cause}`" if cause else "no verdict") + ("" if case["right"] else " ✗")


def _agreement(case: dict[str, Any]) -> str:
    return agreement(row_of(case))


def _saves(case: dict[str, Any]) -> str:
    saving = case["answer"]["measured"] or case["answer"]["predicted"]
    return f"{saving['value']:.0%}" if saving else ""


def _remedy_saved(case: dict[str, Any]) -> str:
    words = str(case["case"]["remedy"]).replace("|", "/")
    return f"{case['remedy']['saving']:.0%} ({words})" if case["remedy"] else ""


def _rival(answer: dict[str, Any]) -> str:
    words = (answer["verdict"] or "nothing")[:60].replace("|", "/")
    return words + ("" if answer["right"] else " ✗")


if __name__ == "__main__":
    main()
