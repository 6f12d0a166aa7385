"""Runs the fault matrix's scripts: profiled, timed with and without their remedy, and under the rivals."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from accel.profiler.host import CrowdMeter, usable_cores
from accel.profiler.report import from_json
from benchmarks.faults.rivals import RIVALS, RivalAnswer, ask
from benchmarks.faults.rows import Answer, Remedy, Row, Stability, Timing, answer_of, error_of, is_right, remedy_of
from benchmarks.faults.table import Case
from benchmarks.record import header

ROOT = Path(__file__).resolve().parents[2]
PAIRS = 2
LIMIT_S = 300
"""A script that runs longer is ended."""


class RunFailed(RuntimeError):
    """A script or a profiler ended with an error; the message holds the end of what it wrote."""


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


def settle(limit_s: float = 60, quiet: float = 0.25) -> None:
    """Wait until other processes leave the cores alone: beside a busy one, a step took up to 40 times as long."""
    end = time.monotonic() + limit_s
    meter, others = CrowdMeter(), float("inf")
    while others > quiet and time.monotonic() < end:
        time.sleep(0.3)
        others = meter.cores() or 0.0


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


def repeated(case: Case, steps: int, times: int) -> Stability:
    """Profile a case again and again, on a quiet machine and on a half-busy one in turns: drifts fall on both."""
    cores = usable_cores()
    half = max(1, cores // 2)
    causes: dict[int, list[str]] = {0: [], half: []}
    for _ in range(times):
        for others, named in causes.items():
            settle()
            with busy(others):
                named.append(profile(case, steps).cause)
    about = header("", "")
    beside = case.cause_beside(half, cores)
    return Stability(causes[0], causes[half], beside, about["date"], about["machine"])


def consult(rival: str, case: Case, python: str, steps: int) -> RivalAnswer:
    """Return a rival's answer; one that fails is wrong."""
    settle()
    try:
        return ask(rival, case, python, steps, run)
    except (RunFailed, OSError, ValueError, LookupError, sqlite3.Error) as error:
        return RivalAnswer("", False, f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def busy(processes: int, limit_s: float = LIMIT_S) -> Iterator[None]:
    """Keep this many cores busy with spinning processes, which end by themselves should this one be killed."""
    spin = f"import time\nend = time.monotonic() + {limit_s}\nwhile time.monotonic() < end: pass"
    spinning = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
        for process in spinning:
            process.wait()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do with each case."""

    tools: tuple[str, ...] = ("accel",)
    steps: int = 260
    remedy: bool = True
    loaded: bool = False
    rivals_python: str | None = None
    repeats: int = 0
    """Further profiles on a quiet machine, and as many on a half-busy one."""

    def examine(self, case: Case) -> Row:
        """Ask the tools about a case, then try its remedy."""
        answer = right = None
        if "accel" in self.tools:
            settle()
            with busy(usable_cores() if self.loaded else 0):
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
        stability = repeated(case, self.steps, self.repeats) if self.repeats else None
        return Row(
            case, answer, right, remedy, error_of(answer, remedy, right=right), rivals, failed, stability, case.digest
        )
