"""`accel run --patch` on training scripts that others wrote: is the patched script as fast, alone, as the run was?

    python -m benchmarks.patches [SCRIPT …] [--rounds 3] [--budget 10s] [--sources FOLDER] [--record]

Each script has a run under `accel run --patch`. What it kept that no line of a script does is named, and left out of a
run anew, so that patch and run have the same plan. Then the plain script, a later run under `accel run`, with what the
first one has remembered, and the patched script alone take turns. A gain is a ratio of the medians of the times from
one step of the optimizer to the next, in the second half of a run. The patch holds if it has nine tenths of the run's
gain. A patch made under `--allow exact` must give the same output and files as the plain script.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.console import Console

from benchmarks.public.scripts import SCRIPTS, PublicScript, fetch
from benchmarks.public_scripts import Ending, ScriptFailed, run, sources_option
from benchmarks.record import Column, Record
from benchmarks.render import SOURCE, Row
from benchmarks.spread import Spread, geometric_mean, ratios

LONGER = {name: script for name, script in SCRIPTS.items() if script.longer is not None}
SHARE = 0.9
"""Of the run's gain, what the patch alone must have."""
RECORD = Record(
    "patches",
    "`accel run --patch` on public training scripts: gains of a step, in the run and of the patched script alone",
    {
        "script": Column("by its name", "script"),
        "written": Column("strategies in the patch", "in the patch"),
        "left": Column("strategies that were kept and can't be written, with the reason", "left out"),
        "exact": Column("strategies in the patch made under exact"),
        "same": Column("output and files of that patch are those of the plain script", "same under `exact`"),
        "plain_ms": Column("a step of the plain script, the mean", "plain ms", ":.2f"),
        "told": Column("the speed-up that the run's report has", "by its report"),
        "run": Column("plain ÷ later run", "run [least, most]", "{run:.2f}x [{run_low:.2f}, {run_high:.2f}]"),
        "run_low": Column("the least of all rounds"),
        "run_high": Column("the most"),
        "patched": Column(
            "plain ÷ patched", "patched alone [least, most]", "{patched:.2f}x [{patched_low:.2f}, {patched_high:.2f}]"
        ),
        "patched_low": Column("the least of all rounds"),
        "patched_high": Column("the most"),
        "process": Column("plain ÷ patched, seconds of whole processes", "whole process", "{process:.2f}x"),
        "holds": Column("the patch has nine tenths of the gain, or there is nothing to write", "holds"),
    },
    head=f"{SOURCE}. Gains of a step.",
    key=("script",),
)


@dataclass(frozen=True)
class Bench:
    """A script with a place to run it in.

    Args:
        script: what to run.
        source: its repository.
        scratch: a folder for its copies.
        budget: of a search.
    """

    script: PublicScript
    source: Path
    scratch: Path
    budget: str

    def plain(self) -> Ending:
        """Run it plainly."""
        return _worked(run(self.script, self.source, None, self.scratch))

    def accelerated(self, *options: str) -> Ending:
        """Run it under `accel run`."""
        return _worked(run(self.script, self.source, options, self.scratch))

    def patched(self, patch: Path) -> Ending:
        """Run it patched, and without accel."""
        return _worked(run(self.script, self.source, None, self.scratch, patch))

    def search(self, patch: Path, *options: str) -> tuple[list[str], dict[str, str], float | None]:
        """Search from an empty cache and write the patch; return what is in it, what is not, and the speed-up told."""
        shutil.rmtree(self.scratch / "cache", ignore_errors=True)
        report = self.scratch / "report.json"
        report.unlink(missing_ok=True)
        ending = self.accelerated("--budget", self.budget, "--patch", str(patch), "--report", str(report), *options)
        told = json.loads(report.read_text(encoding="utf-8"))["speedup"] if report.exists() else None
        return *said_of_patch(ending.said), told


def said_of_patch(said: str) -> tuple[list[str], dict[str, str]]:
    """Return the strategies that a run has written into its patch, and those that it left out with their reasons."""
    line = next((line for line in said.splitlines() if line.startswith(("accel: wrote ", "accel: no patch: "))), "")
    written = re.search(r" with ([\w, ]+) \(patch ", line)
    if not written and not line.endswith("nothing was kept") and " is left out: " not in line:
        raise ScriptFailed(line or "it said nothing of a patch")
    left = dict(re.findall(r"(\w+) is left out: (.*?)(?=; \w+ is left out: |$)", line))
    return written[1].split(", ") if written else [], left


def _worked(ending: Ending) -> Ending:
    if ending.status:
        raise ScriptFailed(f"status {ending.status}: {(ending.said.strip().splitlines() or ['it said nothing'])[-1]}")
    return ending


def compare(name: str, source: Path, rounds: int, budget: str) -> Row:
    """Run one script all ways, and return its row.

    Raises:
        ScriptFailed: if it fails in one of them.
    """
    script = SCRIPTS[name]
    script = replace(script, arguments=(*script.arguments, *(script.longer or ())))
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(script, source, Path(folder), budget)
        exact, patch = Path(folder) / "exact.diff", Path(folder) / "out.diff"
        exactly, *_ = bench.search(exact, "--allow", "exact")
        written, left, told = bench.search(patch)
        disabled = [word for strategy in left for word in ("--disable", strategy)]
        if left:
            written, _, told = bench.search(patch, *disabled)
        times: dict[str, list[Ending]] = {"plain": [], "run": [], "patched": []}
        for number in range(rounds if written else 1):
            kinds = ["plain", "run", "patched"] if written else ["plain"]
            for kind in kinds if number % 2 else reversed(kinds):
                if kind == "run":
                    times[kind].append(bench.accelerated(*disabled))
                else:
                    times[kind].append(bench.plain() if kind == "plain" else bench.patched(patch))
        plain = times["plain"][0]
        same = plain.differs(bench.patched(exact)) if exactly and script.repeats else ""
        row: Row = {
            "script": name,
            "written": ", ".join(written) or "nothing",
            "left": "; ".join(f"{strategy}: {why}" for strategy, why in left.items()),
            "exact": ", ".join(exactly) or "nothing",
            "same": "yes" if not same else f"no: {same}",
            "plain_ms": 1e3 * geometric_mean(_steps(times["plain"])),
            "told": "none" if told is None else f"{told:.2f}x",
        }
        return {**row, **_gains(times)}


def _steps(endings: list[Ending]) -> list[float]:
    return [ending.step_s for ending in endings if ending.step_s is not None]


def _gains(times: dict[str, list[Ending]]) -> Row:
    found: dict[str, Spread] = {}
    for kind in ("run", "patched"):
        each = ratios(_steps(times["plain"]), _steps(times[kind])) if times[kind] else [1.0]
        found[kind] = Spread(geometric_mean(each), min(each), max(each))
    seconds = [[ending.seconds for ending in times[kind]] for kind in ("plain", "patched")]
    return {
        **found["run"].named("run", "run_low", "run_high"),
        **found["patched"].named("patched", "patched_low", "patched_high"),
        "process": geometric_mean(ratios(*seconds)) if times["patched"] else 1.0,
        "holds": found["patched"].median - 1 >= SHARE * (found["run"].median - 1),
    }


@click.command()
@click.argument("scripts", nargs=-1, type=click.Choice(sorted(LONGER)))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1), help="Runs of each kind.")
@click.option("--budget", default="10s", show_default=True, help="Of a search.")
@sources_option
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(scripts: tuple[str, ...], rounds: int, budget: str, sources: Path, record: bool) -> None:
    """Patch public SCRIPTS (default: all that can run long enough); exit with 1 if a patch differs or gains less."""
    console = Console(highlight=False, soft_wrap=True)
    bad = False
    for name in scripts or LONGER:
        try:
            row = compare(name, fetch(SCRIPTS[name].repo, sources), rounds, budget)
        except ScriptFailed as error:
            bad = True
            console.print(f"{name}: {error}", markup=False)
            continue
        bad = bad or row["same"] != "yes" or not row["holds"]
        if record:
            RECORD.write([row])
        line = (
            "{script}: patch of {written}; run {run:.2f}x, patched alone {patched:.2f}x (whole process {process:.2f}x)"
        )
        line += ", holds: {holds}; exact ({exact}) the same: {same}"
        console.print((line + ("; left out: {left}" if row["left"] else "")).format_map(row), markup=False)
    sys.exit(bad)


if __name__ == "__main__":
    main()
