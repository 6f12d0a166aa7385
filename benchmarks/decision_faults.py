"""Are the tests any good? Put a fault into each decision, and see which test of the default run fails.

    python -m benchmarks.decision_faults [FAULT …] [--record]

Each fault of benchmarks/decisions/ is put into a process of its own while the tests that are to catch it run; no file
is changed. A fault that no test notices is a missing test.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console

from benchmarks.decisions.fault import ROOT, Fault
from benchmarks.decisions.plugin import VARIABLE
from benchmarks.decisions.table import FAULTS
from benchmarks.record import Column, Record

LIMIT_S = 120.0
"""Tests that run longer are ended; the fault then counts as not caught."""
DEFAULT_RUN = "not slow and not gpu and not integration"
"""The tests that `make test` runs."""

RECORD = Record(
    name="decision-faults",
    what="faults put into each decision on purpose, and the first test of the default run that failed",
    columns={
        "fault": Column("its name in benchmarks/decisions/"),
        "decision": Column("whose fault it is", "decision"),
        "what": Column("what it does wrong", "fault"),
        "place": Column("module and attribute that it replaces"),
        "caught_by": Column("first test that failed, '' if none did", "caught by", lambda row: short(row["caught_by"])),
        "outcome": Column("what that test said, else what became of the run"),
        "seconds": Column("how long its tests ran, with their imports"),
    },
    head=lambda result: (
        f"`{result['command']}`, {result['date']}: {sum(bool(row['caught_by']) for row in result['rows'])} of "
        f"{len(result['rows'])} caught."
    ),
)


@dataclass(frozen=True)
class Caught:
    """What the tests said of a fault."""

    test: str
    """The first that failed, '' if none did."""
    outcome: str = ""
    """What it said; else why there is none: they passed, took too long, or could not run."""


@click.command()
@click.argument("names", nargs=-1, metavar="[FAULT]…")
@click.option("--record", is_flag=True, help="Write the table to benchmarks/results/; only with all faults.")
def main(names: tuple[str, ...], record: bool) -> None:
    """Put FAULTS (default: all) in, each in a process of its own, and exit with 1 if one is not caught."""
    if unknown := [name for name in names if name not in FAULTS]:
        raise click.BadParameter(f"no such fault: {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    if names and record:
        raise click.UsageError("a part of the faults is not recorded; leave out the names, or --record")
    console = Console(highlight=False, soft_wrap=True)
    rows = []
    for fault in [FAULTS[name] for name in names or FAULTS]:
        rows.append(examined(fault))
        console.print(one_line(rows[-1]), markup=False)
    missed = [row["fault"] for row in rows if not row["caught_by"]]
    console.print(f"{len(rows) - len(missed)} of {len(rows)} caught")
    if record:
        RECORD.write(rows, "python -m benchmarks.decision_faults")
    if missed:
        sys.exit(1)


def examined(fault: Fault) -> dict[str, Any]:
    """Return a fault's row: put in while its tests run."""
    began = time.monotonic()
    caught = caught_by(fault)
    return {
        "fault": fault.name,
        "decision": fault.decision,
        "what": fault.what,
        "place": fault.place,
        "caught_by": caught.test,
        "outcome": caught.outcome,
        "seconds": round(time.monotonic() - began, 1),
    }


def command(tests: Sequence[str]) -> list[str]:
    """Return the command that runs tests up to the first failure, without those that the default run leaves out."""
    flags = ["-q", "-x", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-p", "benchmarks.decisions.plugin"]
    return [sys.executable, "-m", "pytest", *flags, "-m", DEFAULT_RUN, *tests]


def caught_by(fault: Fault, limit_s: float = LIMIT_S) -> Caught:
    """Run a fault's tests in a process that has it."""
    environment = {**os.environ, VARIABLE: fault.name, "COLUMNS": "300"}
    try:
        done = subprocess.run(
            command(fault.tests),
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Caught("", f"its tests took longer than {limit_s:.0f} s")
    return first_failure(done.returncode, done.stdout + done.stderr)


def first_failure(status: int, printed: str) -> Caught:
    """Read what pytest printed: a test that fails catches the fault, one that can't even be set up does not."""
    if failed := re.search(r"^FAILED (\S+::.+?)(?: - (.*))?$", printed, re.MULTILINE):
        outcome = (failed[2] or "")[:200]
        if re.match(r"(TypeError|AttributeError|NameError): .*<l(ocals|ambda)>", outcome):
            return Caught("", f"the fault no longer fits the code: {outcome}")  # any test that comes by fails
        return Caught(failed[1], outcome)
    if status == 0:
        return Caught("", "all tests passed")
    return Caught("", f"exit status {status}: {(printed.strip().splitlines() or [''])[-1][:200]}")


def short(test: str) -> str:
    """Return a test's name for a table, without its parameters."""
    return f"`{test.partition('[')[0].removeprefix('tests/')}`" if test else "nothing"


def one_line(row: dict[str, Any]) -> str:
    """Return a fault's outcome as it comes in."""
    mark = "ok  " if row["caught_by"] else "FAIL"
    return f"{mark} {row['fault']:28} {row['seconds']:5.1f} s  {row['caught_by']}  {row['outcome']}"


if __name__ == "__main__":
    main()
