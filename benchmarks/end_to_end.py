"""End to end: how many steps a whole process takes in the same time, plainly and with the one line.

    python -m benchmarks.end_to_end [MODEL …] [--variant first --variant second] [--seconds 180] [--record]

Each process begins with its imports, so the search, its trials and the import of accel count against the speed-up. The
second run finds what the first one remembered, as a script does that is started again; torch's compiled graphs are
found again too. A process with accel and a plain one take turns of two seconds (`benchmarks.turns`), so that both meet
the same neighbours; `--variant plain` shows what is left of the noise.

To save time a variant without accel, and the plain process beside it, end `--hold` seconds after their third step; the
rest of `--seconds` is counted at their rate in those seconds (`benchmarks.whole_process`). `--hold 0` runs all to their
end, as those with accel always do.

With `--variant by_hand` the settings of `benchmarks/variants/recipes.py` are tried, and the rivals with their names.
What is recorded of a model stays until the same is recorded anew, so that a recording may be made in parts.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import click
from rich.console import Console

from accel.profiler.trial import interval, winsorised
from benchmarks import strategy_table, whole_process
from benchmarks.end_to_end_table import summary, table_block
from benchmarks.record import Column, Record
from benchmarks.render import Row
from benchmarks.spread import Spread
from benchmarks.suite import MODELS
from benchmarks.variants import VARIANTS, hand_tuned, variant
from benchmarks.whole_process import Course, Process, ProcessFailed

__all__ = ["RECORD", "main", "table_block"]

RECORD = Record(
    "end-to-end",
    "steps of whole processes in the same time ÷ those of plain ones that took turns with them",
    {
        "model": Column("by its name"),
        "variant": Column('"first" and "second" run with accel, or a variant of benchmarks/variants'),
        "allow": Column("of accel.optimize; empty without accel"),
        "size": Column('"tiny" or "full"'),
        "data": Column('"synthetic", in memory, or "real": decoded from files'),
        "seconds": Column("of each process, its imports and the search included"),
        "hold": Column("s that a process without accel went on after its third step; 0: to its end"),
        "turn_s": Column("least length of a turn, s; none where processes ran one after the other"),
        "plain_steps": Column("mean steps of a plain process in that time"),
        "steps": Column("mean steps of this one"),
        "ratio": Column("of steps"),
        "low": Column("lower end of its 95 % interval, from parts of the second half of the time"),
        "high": Column("upper end"),
        "start_s": Column("end of the first step, s"),
        "measured_s": Column("length of the process, s"),
        "loss_s": Column("when the loss was that of the plain one's end, s; none if it never was"),
        "plain_loss_s": Column("when the plain one had it, s"),
        "peak_mb": Column("most memory, MB"),
        "plain_peak_mb": Column("of the plain one"),
        "kept": Column("strategies that stayed, in the last process"),
        "remembered": Column("what was taken over from an earlier run"),
    },
    key=("model", "variant"),
)
LEVELS = [name for name, chosen in VARIANTS.items() if chosen.allow]
CHOICES = ("first", "second", "by_hand", *VARIANTS)
_PARTS = 10
"""Of the second half of a process's time, for the scatter."""


class Job(NamedTuple):
    """What all processes of a comparison share."""

    model: str
    size: str
    data: str
    seconds: float
    hold: float
    allow: str

    def arguments(self, hold: float | None = None) -> list[str]:
        """Return the options of a process."""
        hold = self.hold if hold is None else hold
        return [f"--size={self.size}", f"--data={self.data}", f"--seconds={self.seconds}", f"--hold={hold}"]


Run = Callable[[Sequence[Process]], list[Course | ProcessFailed]]


class Folders:
    """Cache folders of the variants' processes: a first run finds an empty one, a second what the first has left."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._numbers = itertools.count()
        self._folders: dict[str, Path] = {}

    def fresh(self, variant: str) -> dict[str, str]:
        """Return variables that name new folders, also for what comes later."""
        self._folders[variant] = self._root / str(next(self._numbers))
        return self.same(variant)

    def same(self, variant: str) -> dict[str, str]:
        """Return variables that name the folders of the last first run."""
        folder = self._folders[variant]
        names = {"ACCEL_CACHE": "accel", "TORCHINDUCTOR_CACHE_DIR": "inductor", "XDG_CACHE_HOME": "user"}
        autotune = {"PYTORCH_AUTOTUNE_CACHE": str(folder / "autotune.json")}
        return {**autotune, **{name: str(folder / part) for name, part in names.items()}}


def expanded(chosen: Sequence[str], model: str) -> list[str]:
    """Return the variants to run for a model, "by_hand" in its place as each list of settings."""
    names = [name for choice in chosen for name in (hand_tuned(model) if choice == "by_hand" else [choice])]
    if "second" in names:
        names = [name for name in names if name != "first"]
        names.insert(names.index("second"), "first")  # it leaves what the second one finds
    return names


def process(job: Job, name: str, folders: Folders, hold: float | None = None) -> Process:
    """Return the process of one variant."""
    if name in ("first", "second"):
        environ = folders.fresh("accel") if name == "first" else folders.same("accel")
        return Process(job.model, job.allow, job.arguments(hold), environ)
    return Process(job.model, name, job.arguments(hold), folders.fresh(name))


def groups(names: Sequence[str]) -> list[list[str]]:
    """Return which variants take turns with one plain process: those with a search alone, all others together."""
    searching = [[name] for name in names if _searches(name)]
    others = [name for name in names if not _searches(name)]
    return [*searching, *([others] if others else [])]


def _searches(name: str) -> bool:
    return name in ("first", "second") or bool(variant(name).allow)


def compare(job: Job, names: Sequence[str], rounds: int, run: Run = whole_process.run) -> Iterator[tuple[Row, Course]]:
    """Run the variants of a model in turns with plain processes; yield a row and the last course of each.

    Args:
        job: model, size and times.
        names: of the variants, in order.
        rounds: how often each is run.
        run: starts processes that take turns and returns their courses.
    """
    courses: dict[str, list[tuple[Course, Course]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as root:
        folders = Folders(Path(root))
        for turn, (number, group) in product(range(rounds), enumerate(groups(names))):
            for name, own, plain in _in_turns(job, group, folders, run, plain_first=(turn + number) % 2 == 0):
                courses[name].append((own, plain))
    for name, measured_courses in courses.items():
        if measured_courses:
            yield row_of(job, name, measured_courses), measured_courses[-1][0]


def _in_turns(
    job: Job, group: Sequence[str], folders: Folders, run: Run, *, plain_first: bool
) -> Iterator[tuple[str, Course, Course]]:
    """Yield each variant of a group with its course and that of the plain process beside it.

    The first of several equal processes was often the slowest, by some percent, so the plain one is it by turns.
    """
    processes = []
    for name in group:
        processes.append(process(job, name, folders))
        if not _searches(name) and variant(name).caches:  # as its user would, a second time
            run([processes[-1]._replace(arguments=job.arguments(hold=min(job.hold, 2.0) or 2.0))])
    # Where there is a search, the plain process goes on as long as it does.
    plain = process(job, "plain", folders, hold=0.0 if _searches(group[0]) else None)
    if plain_first:
        reference, *outcomes = run([plain, *processes])
    else:
        *outcomes, reference = run([*processes, plain])
    if isinstance(reference, ProcessFailed):
        raise reference
    for name, course in zip(group, outcomes, strict=True):
        if not isinstance(course, ProcessFailed):
            yield name, course, reference
        elif name in ("first", "second"):
            raise course
        else:  # a rival or a recipe that fails on a model is said and left out
            lines = str(course).strip().splitlines()
            click.echo(f"left out: {lines[0]} {lines[-1]}", err=True)


def row_of(job: Job, name: str, courses: Sequence[tuple[Course, Course]]) -> Row:
    """Return the row of a variant: each of its courses with the plain one beside it."""
    seconds = job.seconds
    measured = ratio(courses, seconds)
    last, plain = courses[-1]
    return {
        "model": job.model,
        "variant": name,
        "allow": job.allow if name in ("first", "second") else variant(name).allow,
        "size": job.size,
        "data": job.data,
        "seconds": seconds,
        "hold": job.hold,
        "turn_s": whole_process.TURN_S,
        "plain_steps": fmean(plain.steps_in(seconds) for _, plain in courses),
        "steps": fmean(own.steps_in(seconds) for own, _ in courses),
        **measured.named("ratio", "low", "high"),
        "start_s": fmean(own.ends_s[0] for own, _ in courses),
        "measured_s": fmean(own.ends_s[-1] for own, _ in courses),
        "loss_s": last.reached_s(plain.loss()),
        "plain_loss_s": plain.reached_s(plain.loss()),
        "peak_mb": max(own.peak_mb for own, _ in courses),
        "plain_peak_mb": max(plain.peak_mb for _, plain in courses),
        "kept": last.kept,
        "remembered": last.remembered,
    }


def ratio(courses: Sequence[tuple[Course, Course]], seconds: float) -> Spread:
    """Return the ratio of steps in so many seconds, geometric mean over the processes, with its 95 % interval.

    The interval is from the scatter of the ratio over parts of the second half of the time, in which the search is
    mostly over, and of whole processes.
    """
    totals = [math.log(own.steps_in(seconds) / plain.steps_in(seconds)) for own, plain in courses]
    scatter: list[float] = []
    for total, (own, plain) in zip(totals, courses, strict=True):
        until = min(own.ends_s[-1], plain.ends_s[-1])
        since = max(own.ends_s[0], plain.ends_s[0], until - seconds / 2)
        edges = [since + (until - since) * part / _PARTS for part in range(_PARTS + 1)]
        rates = [[course.steps_until(b) - course.steps_until(a) for a, b in pairwise(edges)] for course in (own, plain)]
        logs = [math.log(fast / slow) for fast, slow in zip(*rates, strict=True) if fast > 0 and slow > 0]
        # Around the process's own ratio: where the search goes on for long, some parts are far off the others.
        logs = winsorised(logs)
        scatter += [each - fmean(logs) + total for each in logs]
    low, high = interval(scatter, 0.025) if len(scatter) > 1 else (-math.inf, math.inf)
    return Spread(math.exp(fmean(totals)), math.exp(low), math.exp(high))


def recorded(record: Record, job: Job) -> Record:
    """Return the record that holds a job's rows: means are over rows of one size, one kind of data and one `allow`."""
    parts = [
        part
        for part, default in ((job.size, "tiny"), (job.data, "synthetic"), (job.allow, "reordered"))
        if part != default
    ]
    return replace(record, name="-".join([record.name, *parts]))


LINE = (
    "{model:7} {variant:10} {plain_steps:6.0f} → {steps:6.0f} steps in {seconds:.0f} s, {ratio:.2f}x [{low:.2f}, "
    "{high:.2f}], first step {start_s:.1f} s, {peak_mb:.0f} MB, kept {words}"
)


@click.command()
@click.argument("models", nargs=-1, type=click.Choice(sorted(MODELS)))
@click.option("--variant", "chosen", multiple=True, default=("first", "second"), type=click.Choice(CHOICES))
@click.option("--seconds", default=180.0, show_default=True, help="Of each process.")
@click.option("--hold", default=20.0, show_default=True, help="Seconds of a process without accel; 0 for all.")
@click.option("--rounds", default=1, show_default=True, type=click.IntRange(1), help="Processes of each variant.")
@click.option("--allow", default="reordered", show_default=True, type=click.Choice(LEVELS), help="In runs with accel.")
@click.option("--size", default="tiny", show_default=True, type=click.Choice(["tiny", "full"]))
@click.option("--data", default="synthetic", show_default=True, type=click.Choice(["synthetic", "real"]))
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/, after each model.")
def main(
    models: tuple[str, ...],
    chosen: tuple[str, ...],
    seconds: float,
    hold: float,
    rounds: int,
    allow: str,
    size: str,
    data: str,
    record: bool,
) -> None:
    """Compare whole processes that train MODELS (default: all)."""
    console = Console(highlight=False, soft_wrap=True)
    rows: list[Row] = []
    for name in chosen:
        if name in VARIANTS and (reason := VARIANTS[name].why_not()):
            console.print(f"left out: {name}: {reason}")
    available = [name for name in chosen if name not in VARIANTS or not VARIANTS[name].why_not()]
    for model in models or MODELS:
        job = Job(model, size, data, seconds, hold, allow)
        measured = list(compare(job, expanded(available, model), rounds))
        for row, _ in measured:
            console.print(LINE.format_map({**row, "words": ", ".join(row["kept"]) or "nothing"}))
        rows += [row for row, _ in measured]
        if record:
            recorded(RECORD, job).write([row for row, _ in measured])
            strategies = [each for row, course in measured for each in strategy_table.rows_of(row, course.rows)]
            if strategies:
                recorded(strategy_table.RECORD, job).write(strategies)
    for line in summary(rows):
        console.print(line)


if __name__ == "__main__":
    main()
