"""The fault matrix: does `accel profile` name what was done to a script, and foresee what undoing it saves?

    python -m benchmarks.fault_matrix [CASE …] [--tools accel,traceml,gpuprof] [--no-remedy] [--loaded] [--record]

Each case of benchmarks/faults/table.py is profiled in a fresh process, as a user would. Then the script runs as it is
and with its remedy, in turns A B B A of fresh processes, and the saving is compared with the one the report predicted.
With --loaded every core is kept busy meanwhile, and the right answer to every case is that the host is oversubscribed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from accel.files import write_atomic
from accel.profiler.report import ProfileReport, Saving, from_json
from benchmarks.faults.table import CASES, HEALTHY, Case, Compare
from benchmarks.rivals_profile import RIVALS, RivalAnswer, ask

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 0.10
"""How far a predicted saving may lie from the remedy's, as a share of the step."""
PAIRS = 2
WIDTH = 200
"""Columns of the table, whatever the terminal has: a row cut into pieces can't be read."""
LIMIT_S = 300
"""A script that runs longer is ended."""
OVERSUBSCRIBED = "host.oversubscribed"
STAT = Path("/proc/stat")


class RunFailed(RuntimeError):
    """A script or a profiler ended with an error; the message holds the end of what it wrote."""


@dataclass(frozen=True)
class Answer:
    """What accel's report says of a case."""

    cause: str
    """Of the first finding, `none` if nothing holds the run back, '' if no verdict was reached."""
    bottleneck: str = ""
    others: list[str] = field(default_factory=list)
    """Causes of the further findings."""
    refused: str = ""
    predicted: Saving | None = None
    measured: Saving | None = None
    step_ms: float = 0.0
    unattributed: float = 0.0
    verdict: str = ""
    failed: str = ""
    """Why there is no report, '' if there is one."""


@dataclass(frozen=True)
class Timing:
    """What a script says of its own speed."""

    steps: int
    seconds_per_step: float
    samples_per_second: float


@dataclass(frozen=True)
class Remedy:
    """What a remedy saved, by experiment."""

    plain: list[Timing]
    fixed: list[Timing]
    saving: float
    """1 - fixed ÷ plain time per step or per sample, of the mean of the turns."""
    low: float
    """The smaller saving of a pair of turns."""
    high: float


@dataclass(frozen=True)
class Row:
    """One case of the matrix."""

    case: Case
    answer: Answer | None
    right: bool | None
    """Whether accel's answer is the expected one; None if it was not asked."""
    remedy: Remedy | None
    error: float | None
    """Predicted minus real saving; None where one of them is missing."""
    rivals: dict[str, RivalAnswer]
    remedy_failed: str = ""
    """Why the remedy could not be tried."""


# --- Judging ---------------------------------------------------------------------------------------------------------


def answer_of(report: ProfileReport) -> Answer:
    """Reduce a report to its answer."""
    first = report.findings[0] if report.findings else None
    return Answer(
        cause=first.cause if first else (HEALTHY if report.bottleneck == HEALTHY else ""),
        bottleneck=report.bottleneck,
        others=[finding.cause for finding in report.findings[1:]],
        refused=report.refused,
        predicted=first.predicted if first else None,
        measured=first.measured if first else None,
        step_ms=report.step_ms,
        unattributed=report.unattributed,
        verdict=report.verdict,
    )


def is_right(case: Case, answer: Answer, *, loaded: bool = False) -> bool:
    """Tell whether the answer is the one to give: on a busy host that it is busy, otherwise the case's cause."""
    if answer.failed:
        return False
    if loaded:
        named = answer.bottleneck == "host" and answer.cause == OVERSUBSCRIBED
        return named or "oversubscribed" in answer.refused.lower()
    if case.healthy:
        return answer.bottleneck == HEALTHY and answer.cause == HEALTHY and not answer.refused
    return answer.cause == case.cause


def prediction(answer: Answer) -> Saving | None:
    """Return the saving that the report foretells: the one its experiment gave, else the one from the clocks."""
    return answer.measured or answer.predicted


def saving(plain: Sequence[Timing], fixed: Sequence[Timing], compare: Compare) -> float:
    """Return 1 - fixed ÷ plain, of the time per step or per sample."""
    slow, fast = (statistics.fmean(_cost(timing, compare) for timing in side) for side in (plain, fixed))
    return 1 - fast / slow


def _cost(timing: Timing, compare: Compare) -> float:
    return timing.seconds_per_step if compare == "seconds_per_step" else 1 / timing.samples_per_second


def remedy_of(plain: list[Timing], fixed: list[Timing], compare: Compare) -> Remedy:
    """Put turns together; turn n of one side is the neighbour of turn n of the other."""
    pairs = [saving([slow], [fast], compare) for slow, fast in zip(plain, fixed, strict=True)]
    return Remedy(plain, fixed, saving(plain, fixed, compare), min(pairs), max(pairs))


def error_of(answer: Answer | None, remedy: Remedy | None, *, right: bool | None) -> float | None:
    """Return predicted minus real saving; None without either, or for a prediction about another cause."""
    foretold = prediction(answer) if answer is not None and right else None
    return None if foretold is None or remedy is None else foretold.value - remedy.saving


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the matrix' figures: accuracy, false alarms and the worst prediction of accel, and how the rivals did."""
    asked = [row for row in rows if row.right is not None]
    faults = [row for row in asked if not row.case.healthy]
    controls = [row for row in asked if row.case.healthy]
    errors = {row.case.name: row.error for row in rows if row.error is not None}
    worst = max(errors, key=lambda name: abs(errors[name]), default=None)
    rivals = {name: [row for row in rows if name in row.rivals] for name in RIVALS}
    return {
        "cases": len(asked),
        "right": sum(bool(row.right) for row in asked),
        "faults": len(faults),
        "faults_named": sum(bool(row.right) for row in faults),
        "controls": len(controls),
        "false_alarms": sum(not row.right for row in controls),
        "predictions": len(errors),
        "predictions_within": sum(abs(error) <= TOLERANCE for error in errors.values()),
        "worst_prediction": None if worst is None else {"case": worst, "error": errors[worst]},
        "rivals": {name: _rival_figures(name, seen) for name, seen in rivals.items() if seen},
    }


def _rival_figures(name: str, rows: Sequence[Row]) -> dict[str, int]:
    controls = [row for row in rows if row.case.healthy]
    return {
        "cases": len(rows),
        "right": sum(row.rivals[name].right for row in rows),
        "controls": len(controls),
        "false_alarms": sum(not row.rivals[name].right for row in controls),
        "failed": sum(bool(row.rivals[name].failed) for row in rows),
    }


# --- Running ---------------------------------------------------------------------------------------------------------


def launch(case: Case) -> list[str]:
    """Return how Python is started for a case: alone, or as many ranks on this host."""
    if case.ranks == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]


def script_command(case: Case, steps: int, *, fixed: bool) -> list[str]:
    """Return the command that trains plainly, with the fault or with its remedy."""
    return [*launch(case), str(case.script), "--steps", str(steps), *(["--fixed"] if fixed else [])]


def profile_command(case: Case, steps: int, report: Path) -> list[str]:
    """Return the command that profiles the case and leaves its report in a file."""
    return [
        *launch(case),
        "-m",
        "accel",
        "profile",
        "--json",
        str(report),
        str(case.script),
        "--",
        "--steps",
        str(steps),
    ]


def run(command: Sequence[str], folder: Path = ROOT, limit_s: float = LIMIT_S) -> str:
    """Run a command in a folder, the root of the project by default, and return what it printed.

    Raises:
        RunFailed: if it ends with an error or takes longer than `limit_s`.
    """
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"took longer than {limit_s:.0f} s") from None
    if done.returncode:
        raise RunFailed(f"exit status {done.returncode}: {_tail(done.stderr or done.stdout)}")
    return done.stdout


def _tail(text: str, lines: int = 3) -> str:
    return " | ".join(line.strip() for line in text.strip().splitlines()[-lines:])


def timing_of(printed: str) -> Timing:
    """Read the line of figures that a script prints.

    Raises:
        RunFailed: if there is none.
    """
    for line in reversed(printed.splitlines()):
        if line.startswith("{"):
            return Timing(**json.loads(line))
    raise RunFailed(f"printed no line of figures: {_tail(printed)}")


def foreign_load(window_s: float = 0.3) -> float:
    """Return how many cores are busy while this process sleeps; 0 where the system does not say."""
    if not STAT.exists():
        return 0.0
    before = _ticks()
    time.sleep(window_s)
    busy_ticks, all_ticks = (after - then for after, then in zip(_ticks(), before, strict=True))
    return (os.cpu_count() or 1) * busy_ticks / max(all_ticks, 1)


def _ticks() -> tuple[int, int]:
    """Return the busy and all ticks of the host's cores since it started."""
    ticks = [int(field) for field in STAT.read_text().partition("\n")[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # idle and waiting for input or output


def settle(limit_s: float = 60, quiet: float = 0.25) -> None:
    """Wait until other processes leave the cores alone: beside a busy one, a step took up to 40 times as long."""
    end = time.monotonic() + limit_s
    while foreign_load() > quiet and time.monotonic() < end:
        pass


def time_script(case: Case, steps: int, *, fixed: bool) -> Timing:
    """Train once in a fresh process, on a quiet host, and return its own timing."""
    settle()
    return timing_of(run(script_command(case, steps, fixed=fixed)))


def race(case: Case, steps: int, pairs: int = PAIRS) -> Remedy:
    """Train with the fault and with its remedy in turns A B B A …"""
    turns: dict[bool, list[Timing]] = {False: [], True: []}
    order = [False, True]
    for _ in range(pairs):
        for fixed in order:
            turns[fixed].append(time_script(case, steps, fixed=fixed))
        order.reverse()
    return remedy_of(turns[False], turns[True], case.compare)


def profile(case: Case, steps: int) -> Answer:
    """Profile the case in a fresh process and return the report's answer."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        try:
            run(profile_command(case, steps, report))
            return answer_of(from_json(report.read_text(encoding="utf-8")))
        except (RunFailed, OSError, ValueError) as error:
            return Answer("", failed=str(error))


def consult(rival: str, case: Case, python: str, steps: int) -> RivalAnswer:
    """Return a rival's answer; one that fails is wrong."""
    settle()
    try:
        return ask(rival, case, python, steps, run)
    except (RunFailed, OSError, ValueError, LookupError, sqlite3.Error) as error:
        return RivalAnswer("", False, f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep this many cores busy with spinning processes, which end by themselves should this one be killed."""
    spin = f"import time\nend = time.monotonic() + {LIMIT_S}\nwhile time.monotonic() < end: pass"
    spinning = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
        for process in spinning:
            process.wait()


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do with each case."""

    tools: tuple[str, ...] = ("accel",)
    steps: int = 260
    remedy: bool = True
    loaded: bool = False
    rivals_python: str | None = None

    def examine(self, case: Case) -> Row:
        """Ask the tools about a case, then try its remedy."""
        answer = right = None
        if "accel" in self.tools:
            settle()
            with busy(cores() if self.loaded else 0):
                answer = profile(case, self.steps)
            right = is_right(case, answer, loaded=self.loaded)
        rivals = {}
        if self.rivals_python:
            rivals = {
                name: consult(name, case, self.rivals_python, self.steps) for name in RIVALS if name in self.tools
            }
        remedy, failed = None, ""
        if self.remedy and case.remedy and not self.loaded:
            try:
                remedy = race(case, self.steps)
            except RunFailed as error:
                failed = str(error)
        return Row(case, answer, right, remedy, error_of(answer, remedy, right=right), rivals, failed)


# --- Showing ---------------------------------------------------------------------------------------------------------


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
        target = Path(__file__).parent / "results" / f"{_title(loaded)}-cpu-{date.today().isoformat()}.json"
        found = _record(rows, summary, plan)
        if cases and target.exists():
            held = json.loads(target.read_text(encoding="utf-8"))
            rows = merged(held["cases"], rows)
            again = sorted({*held.get("again", []), *cases})
            found = {**_record(rows, summarise(rows), plan), "command": held["command"], "again": again}
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


def merged(recorded: Sequence[dict[str, Any]], rows: Sequence[Row]) -> list[Row]:
    """Return recorded rows with those of the cases that were run again in their places; rivals not asked again stay."""
    new = {row.case.name: row for row in rows}
    result = []
    for held in recorded:
        old = _row_of(held)
        row = new.pop(old.case.name, old)
        result.append(row if row.rivals else replace(row, rivals=old.rivals))
    return [*result, *new.values()]


def _row_of(held: dict[str, Any]) -> Row:
    """Build a row from its JSON; the error is worked out anew."""
    answer, remedy = held["answer"], held["remedy"]
    if answer is not None:
        known = {name: Saving(**answer[name]) if answer[name] else None for name in ("predicted", "measured")}
        answer = Answer(**{**answer, **known})
    if remedy is not None:
        turns = {side: [Timing(**timing) for timing in remedy[side]] for side in ("plain", "fixed")}
        remedy = Remedy(**{**remedy, **turns})
    rivals = {name: RivalAnswer(**told) for name, told in held["rivals"].items()}
    error = error_of(answer, remedy, right=held["right"])
    return Row(Case(**held["case"]), answer, held["right"], remedy, error, rivals, held.get("remedy_failed", ""))


def _record(rows: Sequence[Row], summary: dict[str, Any], plan: Plan) -> dict[str, Any]:
    import torch

    from accel.journal import machine_name

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
