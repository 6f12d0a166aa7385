"""`accel run` on training scripts that others wrote: the same result, and how much faster.

    python -m benchmarks.public_scripts [SCRIPT …] [--rounds 3] [--minutes 3] [--sources FOLDER] [--record]

Each script runs plainly and under `accel run --allow exact`: exit status, output (but its times) and files must be the
same. Then, in each round, a plain run, a first one under `accel run`, with an empty cache, and a later one, with what
that one has remembered, take turns. Whole processes are timed, imports and search included.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click
from rich.console import Console

from benchmarks.public.scripts import SCRIPTS, PublicScript, fetch
from benchmarks.record import DATA, ROOT, Column, Record
from benchmarks.render import SOURCE, Row
from benchmarks.spread import Spread, geometric_mean, ratios

RECORD = Record(
    "public-scripts",
    "`accel run` on public training scripts: same result under exact, and seconds of whole processes",
    {
        "script": Column("by its name", "script"),
        "repo": Column("on GitHub", "from"),
        "same": Column("exit status, output and files as without accel, under exact", "same under `exact`"),
        "plain_s": Column("a plain run, the mean", "plain s", ":.1f"),
        "first": Column(
            "plain ÷ first run, with an empty cache; geometric mean",
            "first run [least, most]",
            "{first:.2f}x [{first_low:.2f}, {first_high:.2f}]",
        ),
        "first_low": Column("the least of all rounds"),
        "first_high": Column("the most"),
        "ratio": Column(
            "plain ÷ later run; geometric mean", "later runs [least, most]", "{ratio:.2f}x [{low:.2f}, {high:.2f}]"
        ),
        "low": Column("the least of all rounds"),
        "high": Column("the most"),
        "why": Column("what was kept, or why nothing was", "kept, or why nothing"),
    },
    head=f"{SOURCE}. Whole processes, imports and search included.",
    key=("script",),
)

LONG = Record(
    "long-scripts",
    "`accel run` on public training scripts that take minutes: seconds of whole processes, the search included",
    {
        "script": Column("by its name", "script"),
        "machine": Column("if it differs from that of the newest rows", "on", lambda row: row.get("machine")),
        "plain_s": Column("a plain run, the mean", "plain s", ":.0f"),
        "first": RECORD.columns["first"],
        "first_low": RECORD.columns["first_low"],
        "first_high": RECORD.columns["first_high"],
        "step": Column(
            "plain ÷ first, a step in the second half of the run; geometric mean",
            "later steps [least, most]",
            "{step:.2f}x [{step_low:.2f}, {step_high:.2f}]",
        ),
        "step_low": Column("the least of all rounds"),
        "step_high": Column("the most"),
        "why": Column("what was kept, or why nothing was, in the last run", "kept, or why nothing"),
    },
    head=lambda result: f"{SOURCE.format_map(result)}. {_mean_of(result)}",
    key=("script",),
)


def _mean_of(result: Row) -> str:
    firsts = [row["first"] for row in result["rows"]]
    mean = f"geometric mean of {len(firsts)} scripts {geometric_mean(firsts):.2f}x, least {min(firsts):.2f}x"
    return f"First runs, with an empty cache; {mean}."


SITE = ROOT / "benchmarks" / "public" / "site"

# What scripts print of the time that they took.
_TIMES = re.compile(
    r"ms/batch\s+[\d.]+|time:\s*[\d.]+\s*s?|time [\d.]+m?s|mfu -?[\d.]+%|iter_dt [\d.]+ms|valid (?:loss|ppl) time"
    r"|(?:Time|Data)\s+[\d.]+ \(\s*[\d.]+\)"
)
# Files that hold times or the interpreter's own things.
_NOT_COMPARED = re.compile(r"\.pyc$|\.log$|\.pdf$")


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Args:
        status: of the process.
        output: what it printed, times left out.
        files: each file it wrote, by its path, as a hash of its content.
        seconds: of the whole process.
        said: what accel said.
        step_s: between the ends of two steps of an optimizer, the median of the run's second half; None without steps.
    """

    status: int
    output: str
    files: dict[str, str]
    seconds: float
    said: str
    step_s: float | None = None

    def differs(self, other: Ending) -> str:
        """Return in what two runs differ, '' if in nothing."""
        if self.status != other.status:
            return f"exit status {other.status}, plainly {self.status}"
        if self.output != other.output:
            lines = zip(self.output.splitlines(), other.output.splitlines(), strict=False)
            plain, own = next(((a, b) for a, b in lines if a != b), ("", "the number of lines"))
            return f"output: {own!r}, plainly {plain!r}"
        different = sorted(
            {name for name, _ in self.files.items() ^ other.files.items() if not _NOT_COMPARED.search(name)}
        )
        return f"files: {', '.join(different)}" if different else ""


def run(
    script: PublicScript, source: Path, accel_options: Sequence[str] | None, scratch: Path, patch: Path | None = None
) -> Ending:
    """Run a script in a fresh copy of its repository, at the same place each time.

    Args:
        script: what to run.
        source: the repository.
        accel_options: of `accel run`; None runs it plainly.
        scratch: a folder for the copy, and for what accel remembers.
        patch: a diff of `accel run --patch` to apply before.
    """
    copy, steps = scratch / "copy", scratch / "steps.json"
    shutil.rmtree(copy, ignore_errors=True)
    steps.unlink(missing_ok=True)
    path = script.prepare(source, copy)
    if patch is not None:
        changed = patch.read_text(encoding="utf-8").partition("--- a/")[2].partition("\n")[0]
        root = next(folder for folder in path.parents if (folder / changed).exists())
        subprocess.run(["patch", "-s", "-p1", "-i", str(patch)], cwd=root, check=True)
    before = _files(copy)
    command = [sys.executable, str(path), *script.arguments]
    if accel_options is not None:
        command = [sys.executable, "-m", "accel", "run", *accel_options, *command[1:2], "--", *command[2:]]
    search = os.pathsep.join(map(str, (SITE, copy, ROOT)))
    environment = {
        **os.environ,
        **script.environment,
        **{
            "PYTHONPATH": search,
            "ACCEL_CACHE": str(scratch / "cache"),
            "PYTHONHASHSEED": "0",
            "STEP_TIMES": str(steps),
        },
    }
    began = time.perf_counter()
    done = subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True, timeout=1800)
    seconds = time.perf_counter() - began
    written = {name: content for name, content in _files(copy).items() if before.get(name) != content}
    output = _TIMES.sub("", done.stdout)
    return Ending(done.returncode, output, written, seconds, done.stderr, _step_s(steps))


def _step_s(file: Path) -> float | None:
    """Return the median time from one step to the next, in the second half of a run."""
    ends: list[float] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    later = ends[len(ends) // 2 :]
    return median(b - a for a, b in pairwise(later)) if len(later) > 1 else None


def _files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _why(report: Path, said: str) -> str:
    """Return what was kept, with its gain, or the reason why nothing was."""
    if not report.exists():
        lines = [line.removeprefix("accel: ") for line in said.splitlines() if line.startswith("accel: ")]
        return lines[0].removeprefix("nothing was made faster: ") if lines else "nothing was said"
    written: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    kept = [row["name"] for row in written["rows"] if row["status"] == "kept"]
    if kept:
        return ", ".join(kept)
    tried = [f"{row['name']} {row['gain']:.2f}x" for row in written["rows"] if row["gain"] is not None]
    if tried:
        return f"nothing: {', '.join(tried)}"
    ended = written["state"] != "done"
    return f"nothing: {'the run ended before anything was tried' if ended else 'what applies would gain too little'}"


class ScriptFailed(RuntimeError):
    """A script fails without accel."""


_ORDERS = (("plain", "first", "later"), ("first", "later", "plain"))
"""A later run comes after the first one that it remembers."""


def _of_rounds(slow: Sequence[float], fast: Sequence[float]) -> Spread:
    return Spread(geometric_mean(ratios(slow, fast)), min(ratios(slow, fast)), max(ratios(slow, fast)))


def compare(name: str, source: Path, rounds: int) -> Row:
    """Run one script all ways, and return its row.

    Raises:
        ScriptFailed: if it fails plainly; then all ways to run it would agree.
    """
    script = SCRIPTS[name]
    said = ""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        plain = run(script, source, None, Path(scratch))
        if plain.status:
            lines = plain.said.strip().splitlines() or ["it said nothing"]
            raise ScriptFailed(f"{name} fails plainly, with status {plain.status}: {lines[-1]}")
        exact = run(script, source, ["--allow", "exact"], Path(scratch))
        if not script.repeats:
            exact = replace(exact, output=plain.output, files=plain.files)
        same = plain.differs(exact)
        timed: dict[str, list[float]] = {"plain": [], "first": [], "later": []}
        for number in range(rounds):
            for kind in _ORDERS[number % len(_ORDERS)]:
                if kind == "first":
                    shutil.rmtree(Path(scratch) / "cache", ignore_errors=True)
                options = None if kind == "plain" else ["--report", str(report)]
                ending = run(script, source, options, Path(scratch))
                timed[kind].append(ending.seconds)
                said = ending.said if kind == "later" else said
        first, later = (_of_rounds(timed["plain"], timed[kind]) for kind in ("first", "later"))
        return {
            "script": name,
            "repo": script.repo,
            "same": "yes" if not same else f"no: {same}",
            "plain_s": fmean(timed["plain"]),
            **first.named("first", "first_low", "first_high"),
            **later.named("ratio", "low", "high"),
            "why": _why(report, said),
        }


_ABOUT = 1.25
"""How much shorter a run may be than asked for."""


def lasting(script: PublicScript, source: Path, seconds: float) -> tuple[PublicScript, list[Ending]]:
    """Return a script with the arguments of a longer run, their numbers such that a plain one takes about these
    seconds, and a plain run of it, if there has been one."""
    with tempfile.TemporaryDirectory() as scratch:
        longer = replace(script, arguments=(*script.arguments, *(script.longer or ())))
        plain = run(longer, source, None, Path(scratch))
    scale = seconds / plain.seconds
    if scale <= _ABOUT:
        return longer, [plain]
    numbers = [re.sub(r"\d+$", lambda number: str(round(int(number[0]) * scale)), word) for word in script.longer or ()]
    return replace(script, arguments=(*script.arguments, *numbers)), []


def compare_long(name: str, source: Path, rounds: int, plain_s: float) -> Row:
    """Run one script for some time, plainly and under `accel run` with an empty cache, and return its row.

    Raises:
        ScriptFailed: if it fails in one of them.
    """
    script, plain = lasting(SCRIPTS[name], source, plain_s)
    ended: dict[str, list[Ending]] = {"plain": plain, "first": []}
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        for number in range(rounds):
            for kind in ("plain", "first") if number % 2 == 0 else ("first", "plain"):
                if len(ended[kind]) > number:
                    continue
                shutil.rmtree(Path(scratch) / "cache", ignore_errors=True)
                options = None if kind == "plain" else ["--report", str(report)]
                ending = run(script, source, options, Path(scratch))
                if ending.status:
                    raise ScriptFailed(f"{name}, {kind}, fails with status {ending.status}: {ending.said[-500:]}")
                ended[kind].append(ending)
        seconds = {kind: [each.seconds for each in endings] for kind, endings in ended.items()}
        steps = {kind: [each.step_s or 1.0 for each in endings] for kind, endings in ended.items()}
        return {
            "script": name,
            "plain_s": fmean(seconds["plain"]),
            **_of_rounds(seconds["plain"], seconds["first"]).named("first", "first_low", "first_high"),
            **_of_rounds(steps["plain"], steps["first"]).named("step", "step_low", "step_high"),
            "why": _why(report, ended["first"][-1].said),
        }


_FIRST = "plain {plain_s:.1f} s; first {first:.2f}x [{first_low:.2f}, {first_high:.2f}]"
_LINE = f"{{script:20}} same: {{same}}; {_FIRST}; later {{ratio:.2f}}x [{{low:.2f}}, {{high:.2f}}]; {{why}}"
_LONG_LINE = f"{{script:20}} {_FIRST}; later steps {{step:.2f}}x [{{step_low:.2f}}, {{step_high:.2f}}]; {{why}}"


sources_option = click.option(
    "--sources",
    type=click.Path(path_type=Path),
    default=DATA / "public",
    help="Holds the repositories by their names; what is missing is fetched from GitHub.",
)


@click.command()
@click.argument("scripts", nargs=-1, type=click.Choice(sorted(SCRIPTS)))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1), help="Runs of each kind.")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), help="That plain runs take; default: as they are.")
@sources_option
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(scripts: tuple[str, ...], rounds: int, minutes: float | None, sources: Path, record: bool) -> None:
    """Run public SCRIPTS (default: all) plainly and under `accel run`; exit with 1 if one differs, or fails plainly."""
    console = Console(highlight=False, soft_wrap=True)
    rows, failed = list[Row](), False
    for name in scripts or [name for name, script in SCRIPTS.items() if script.longer or minutes is None]:
        try:
            source = fetch(SCRIPTS[name].repo, sources)
            row = compare(name, source, rounds) if minutes is None else compare_long(name, source, rounds, 60 * minutes)
        except ScriptFailed as error:
            failed = True
            console.print(str(error), markup=False)
            continue
        rows.append(row)
        if record:
            (RECORD if minutes is None else LONG).write([row])
        console.print((_LINE if minutes is None else _LONG_LINE).format_map(row), markup=False)
    sys.exit(failed or any(row.get("same", "yes") != "yes" for row in rows))


if __name__ == "__main__":
    main()
