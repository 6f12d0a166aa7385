"""`accel run` on training scripts that others wrote: the same result, and how much faster.

    python -m benchmarks.public_scripts [SCRIPT …] [--pairs 2] [--sources FOLDER] [--record]

Each script runs plainly and under `accel run --allow exact`: exit status, output (but its times) and files must be the
same. Then plain runs and those under `accel run` take turns, the first with an empty cache, the next with what that one
has remembered. Whole processes are timed, imports and search included.
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
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks.public.scripts import SCRIPTS, PublicScript, fetch
from benchmarks.record import DATA, ROOT, Column, Record
from benchmarks.render import SOURCE, Row
from benchmarks.spread import ratio

RECORD = Record(
    "public-scripts",
    "`accel run` on public training scripts: same result under exact, and seconds of whole processes",
    {
        "script": Column("by its name", "script"),
        "repo": Column("on GitHub", "from"),
        "same": Column("exit status, output and files as without accel, under exact", "same under `exact`"),
        "plain_s": Column("a plain run, the mean", "plain s", ":.1f"),
        "first": Column("plain ÷ first run, with an empty cache", "first run", "{first:.2f}x"),
        "ratio": Column("plain ÷ later runs", "later runs [95 %]", "{ratio:.2f}x [{low:.2f}, {high:.2f}]"),
        "low": Column("of its 95 % interval"),
        "high": Column("of its 95 % interval"),
        "why": Column("what was kept, or why nothing was", "kept, or why nothing"),
    },
    head=f"{SOURCE}. Whole processes, imports and search included.",
    key=("script",),
)

SITE = ROOT / "benchmarks" / "public" / "site"

# What scripts print of the time that they took.
_TIMES = re.compile(
    r"ms/batch\s+[\d.]+|time:\s*[\d.]+\s*s?|time [\d.]+m?s|mfu -?[\d.]+%|iter_dt [\d.]+ms|valid (?:loss|ppl) time"
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
    """

    status: int
    output: str
    files: dict[str, str]
    seconds: float
    said: str

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


def run(script: PublicScript, source: Path, accel_options: Sequence[str] | None, scratch: Path) -> Ending:
    """Run a script in a fresh copy of its repository, at the same place each time.

    Args:
        script: what to run.
        source: the repository.
        accel_options: of `accel run`; None runs it plainly.
        scratch: a folder for the copy, and for what accel remembers.
    """
    copy = scratch / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    path = script.prepare(source, copy)
    before = _files(copy)
    command = [sys.executable, str(path), *script.arguments]
    if accel_options is not None:
        command = [sys.executable, "-m", "accel", "run", *accel_options, *command[1:2], "--", *command[2:]]
    search = os.pathsep.join(map(str, (SITE, copy, ROOT)))
    environment = {**os.environ, "PYTHONPATH": search, "ACCEL_CACHE": str(scratch / "cache"), "PYTHONHASHSEED": "0"}
    began = time.perf_counter()
    done = subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True, timeout=1800)
    seconds = time.perf_counter() - began
    written = {name: content for name, content in _files(copy).items() if before.get(name) != content}
    return Ending(done.returncode, _TIMES.sub("", done.stdout), written, seconds, done.stderr)


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
    return f"nothing: {', '.join(tried)}" if tried else "nothing: no step was long enough, or no candidate fits"


def compare(name: str, source: Path, pairs: int) -> Row:
    """Run one script all ways, and return its row."""
    script = SCRIPTS[name]
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        plain = run(script, source, None, Path(scratch))
        exact = run(script, source, ["--allow", "exact"], Path(scratch))
        if not script.repeats:
            exact = replace(exact, output=plain.output, files=plain.files)
        same = plain.differs(exact)
        options = ["--report", str(report)]
        first = run(script, source, options, Path(scratch))
        plains, others, said = [plain.seconds], list[float](), first.said
        for pair in range(pairs):
            for accelerated in (True, False) if pair % 2 == 0 else (False, True):
                ending = run(script, source, options if accelerated else None, Path(scratch))
                (others if accelerated else plains).append(ending.seconds)
                said = ending.said if accelerated else said
        measured = ratio([[seconds] for seconds in plains[1:]], [[seconds] for seconds in others])
        return {
            "script": name,
            "repo": script.repo,
            "same": "yes" if not same else f"no: {same}",
            "plain_s": sum(plains) / len(plains),
            "first": sum(plains[:2]) / len(plains[:2]) / first.seconds,
            "ratio": measured.value,
            "low": measured.low,
            "high": measured.high,
            "why": _why(report, said),
        }


@click.command()
@click.argument("scripts", nargs=-1, type=click.Choice(sorted(SCRIPTS)))
@click.option("--pairs", default=2, show_default=True, type=click.IntRange(2), help="Later runs, and plain ones.")
@click.option(
    "--sources",
    type=click.Path(path_type=Path),
    default=DATA / "public",
    help="Holds the repositories by their names; what is missing is fetched from GitHub.",
)
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(scripts: tuple[str, ...], pairs: int, sources: Path, record: bool) -> None:
    """Run public SCRIPTS (default: all) plainly and under `accel run`; exit with 1 if a result differs."""
    console = Console(highlight=False, soft_wrap=True)
    rows = []
    for name in scripts or SCRIPTS:
        row = compare(name, fetch(SCRIPTS[name].repo, sources), pairs)
        rows.append(row)
        if record:
            RECORD.write([row])
        line = "{script:20} same: {same}; plain {plain_s:.1f} s; first {first:.2f}x; later {ratio:.2f}x "
        console.print((line + "[{low:.2f}, {high:.2f}]; {why}").format_map(row), markup=False)
    sys.exit(any(row["same"] != "yes" for row in rows))


if __name__ == "__main__":
    main()
