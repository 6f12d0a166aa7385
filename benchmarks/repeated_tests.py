"""Do the tests pass on every machine? `make test` again and again: quiet, beside others, on one core, in other orders.

    python -m benchmarks.repeated_tests [CONDITION …] [--times N] [--first N] [--record]

Each run is one row; what is recorded of a run stays until the same is run again.
What a run printed that was not green is added to `.data/repeated-tests.log`.

A test that fails under one condition only is a fault of the test or of what it tests, never of the machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from typing import Any

import click
from rich.console import Console

from accel.profiler.host import usable_cores
from benchmarks.decision_faults import DEFAULT_RUN
from benchmarks.faults.runs import busy
from benchmarks.record import DATA, ROOT, Column, Record
from benchmarks.render import Row, block

_ENDS_WELL = (0, 5)
"""Exit statuses of pytest: all passed, and no tests in what was named."""
LIMIT_S = 3600.0
"""A run that takes longer is ended; it counts as failed."""

MAKE = ["make", "--no-print-directory", "test", f"PYTHON={sys.executable}"]

RECORD = Record(
    name="repeated-tests",
    what="runs of the default tests under all kinds of conditions",
    columns={
        "condition": Column("a name in benchmarks/repeated_tests.py"),
        "number": Column("of the run under it"),
        "seconds": Column("it took"),
        "passed": Column("tests"),
        "failed": Column("tests, errors included"),
        "skipped": Column("tests"),
        "failures": Column("names of the failed ones"),
        "skips": Column("reasons of the skipped ones, with their numbers"),
        "status": Column("exit status of make; none if it was ended after an hour"),
    },
    key=("condition", "number"),
)


@dataclass(frozen=True)
class Outcome:
    """What one run of tests printed."""

    status: int | None
    counts: Mapping[str, int] = field(default_factory=dict)
    failures: Sequence[str] = ()
    skips: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, status: int | None, printed: str) -> Outcome:
        """Read pytest's closing lines."""
        *_, closing = [
            "",
            *re.findall(r"^\d+ (?:passed|failed|skipped|error|deselected).* in [\d.]+s.*$", printed, re.M),
        ]
        counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", closing)}
        failures = re.findall(r"^(?:FAILED|ERROR) (\S+?)(?: - .*)?$", printed, re.M)
        skips: Counter[str] = Counter()
        for number, reason in re.findall(r"^SKIPPED \[(\d+)\] [^:]+:\d+: (.*)$", printed, re.M):
            skips[reason] += int(number)
        return cls(status, counts, failures, skips)

    @classmethod
    def merged(cls, outcomes: Sequence[Outcome]) -> Outcome:
        """Add up runs of parts of the tests; pytest's status 5 says that a file has none by default."""
        counts: Counter[str] = Counter()
        skips: Counter[str] = Counter()
        for outcome in outcomes:
            counts.update(outcome.counts)
            skips.update(outcome.skips)
        statuses = [outcome.status for outcome in outcomes if outcome.status not in _ENDS_WELL]
        return cls(statuses[0] if statuses else 0, counts, [name for each in outcomes for name in each.failures], skips)

    def row(self, condition: str, number: int, seconds: float) -> Row:
        """Return what is recorded."""
        return {
            "condition": condition,
            "number": number,
            "seconds": round(seconds, 1),
            "passed": self.counts.get("passed", 0),
            "failed": self.counts.get("failed", 0) + self.counts.get("error", 0),
            "skipped": self.counts.get("skipped", 0),
            "failures": list(self.failures),
            "skips": dict(self.skips),
            "status": self.status,
        }


Tests = Callable[[int], Outcome]


def make_test(*before: str, core: int | None = None, options: Callable[[int], str] = lambda number: "") -> Tests:
    """Return what runs `make test`: behind other commands, on one core, or with options of pytest."""

    def tests(number: int) -> Outcome:
        environ = {**os.environ, "PYTEST_ADDOPTS": options(number)}
        affinity = None if core is None else (lambda: os.sched_setaffinity(0, {core}))
        return run_tests([*before, *MAKE], environ, affinity)

    return tests


def run_tests(
    command: Sequence[str], environ: Mapping[str, str] | None = None, first: Callable[[], None] | None = None
) -> Outcome:
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ,
        preexec_fn=first,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            printed, _ = running.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            return Outcome(None)
        except BaseException:  # else leaving the block would wait for it
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            raise
    if running.returncode not in _ENDS_WELL:
        DATA.mkdir(exist_ok=True)
        with open(DATA / "repeated-tests.log", "a", encoding="utf-8") as log:
            log.write(f"{shlex.join(command)}\n{printed}\n")
    return Outcome.of(running.returncode, printed)


def each_file_alone(number: int) -> Outcome:
    """Run each file of tests in a process of its own, as many at a time as there are cores."""
    flags = ["-q", "-p", "no:cacheprovider", "-m", DEFAULT_RUN]
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    with ThreadPool(usable_cores()) as pool:
        return Outcome.merged(pool.map(lambda file: run_tests([sys.executable, "-m", "pytest", *flags, file]), files))


@contextlib.contextmanager
def a_busy_core() -> Iterator[None]:
    """Keep one core busy for as long as it takes."""
    with busy(1, LIMIT_S):
        yield


@contextlib.contextmanager
def benchmarks_beside() -> Iterator[None]:
    """Run the benchmarks of this machine beside, over and over; nothing of them is recorded."""
    script = f"while :; do {sys.executable} -m benchmarks.run --no-record; done"
    running = subprocess.Popen(
        ["sh", "-c", script], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()


@dataclass(frozen=True)
class Condition:
    """How tests are run, and how often."""

    meaning: str
    times: int
    tests: Tests
    beside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


CONDITIONS = {
    "quiet": Condition("a quiet machine", 10, make_test()),
    "busy_core": Condition("one core taken by a busy loop", 5, make_test(), a_busy_core),
    "one_core": Condition("pinned to one core", 2, make_test(core=min(os.sched_getaffinity(0)))),
    "nice": Condition("under `nice -n 19`, beside `make bench`", 2, make_test("nice", "-n", "19"), benchmarks_beside),
    "random_order": Condition(
        "in random order, three seeds", 3, make_test(options=lambda number: f"-p randomly --randomly-seed={number}")
    ),
    "file_alone": Condition("each file in a process of its own", 1, each_file_alone),
}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(CONDITIONS)), metavar="[CONDITION]…")
@click.option("--times", type=click.IntRange(1), help="Runs of each; by default what the condition says.")
@click.option("--first", default=1, type=click.IntRange(1), help="Number of the first run, to go on with a recording.")
@click.option("--record", is_flag=True, help="Write the runs to benchmarks/results/.")
def main(names: tuple[str, ...], times: int | None, first: int, record: bool) -> None:
    """Run the tests under CONDITIONS (default: all), and exit with 1 if one has failed or was left out."""
    console = Console(highlight=False, soft_wrap=True)
    rows: list[Row] = []
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what has run is recorded
    try:
        for row in runs(names or list(CONDITIONS), times, first):
            rows.append(row)
            console.print(one_line(row), markup=False)
    finally:  # not sooner: tests compare the pages with what is recorded
        signal.signal(signal.SIGTERM, before)
        if record and rows:
            RECORD.write(rows, "python -m benchmarks.repeated_tests")
    if not all(map(is_green, rows)):
        sys.exit(1)


def runs(names: Sequence[str], times: int | None = None, first: int = 1) -> Iterator[Row]:
    """Yield a row for each run under these conditions, from the one with this number on."""
    for name in names:
        condition = CONDITIONS[name]
        for number in range(first, first + times if times else condition.times + 1):
            began = time.monotonic()
            with condition.beside():
                outcome = condition.tests(number)
            yield outcome.row(name, number, time.monotonic() - began)


def is_green(row: Row) -> bool:
    """Tell whether all tests of a run passed, and none was skipped for what the machine was doing."""
    return row["status"] == 0 and not row["failed"] and row["passed"] > 0 and not _for_load(row)


def _for_load(row: Row) -> list[str]:
    return [reason for reason in row["skips"] if re.search(r"\b(busy|crowd|load|noisy|quiet)", reason)]


def one_line(row: Row) -> str:
    """Return a run's outcome as it comes in."""
    mark = "ok  " if is_green(row) else "FAIL"
    failed = f", failed: {', '.join(row['failures'])}" if row["failures"] else ""
    counts = f"{row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped"
    return f"{mark} {row['condition']:12} {row['number']:2}  {row['seconds']:6.0f} s  {counts}{failed}"


def table_block(result: Row) -> str:
    """Return one line for each condition."""
    by_condition = [
        [row for row in result["rows"] if row["condition"] == name]
        for name in CONDITIONS
        if any(row["condition"] == name for row in result["rows"])
    ]
    columns: dict[str, Any] = {
        "condition": lambda rows: CONDITIONS[rows[0]["condition"]].meaning,
        "runs": lambda rows: str(len(rows)),
        "green": lambda rows: str(sum(map(is_green, rows))),
        "s": lambda rows: _range([row["seconds"] for row in rows]),
        "tests": lambda rows: _range([row["passed"] for row in rows]),
        "skipped": lambda rows: _range([row["skipped"] for row in rows]),
        "failed": lambda rows: ", ".join(f"`{name}`" for row in rows for name in row["failures"]) or "-",
    }
    dates = [row.get("date", result["date"]) for row in result["rows"]]
    when = " to ".join(dict.fromkeys((min(dates), max(dates))))
    head = f"`{result['command']}`, {when}, {result['machine']}, {result['cores']} cores, torch {result['torch']}."
    return block(head, columns, by_condition)  # type: ignore[arg-type]


def _range(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.0f}" for value in (min(values), max(values))))


if __name__ == "__main__":
    main()
