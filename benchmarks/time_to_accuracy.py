"""How long real jobs take to a target: by the user's batch, by fixed larger ones, and by accel, which chooses it.

    python -m benchmarks.time_to_accuracy [--job images] [--variant accel] [--seeds 3] [--short] [--record]

Each run is a process of its own; those of one job and seed take turns of two seconds. The variants stand in
`benchmarks.to_target.process`, the jobs in `benchmarks.to_target.jobs`. For one seed the initial weights and the order
of samples are the same in all runs. With --record each row replaces what stood for the same job, variant and seed.

The best fixed batch is that of the sweep which takes the least time over all seeds, x1 among them: what a user would
keep who has tried them all.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import click

from accel.profiler.host import usable_cores
from benchmarks.record import Column, Record
from benchmarks.render import Cell, Row, block
from benchmarks.spread import Spread, extremes
from benchmarks.to_target.jobs import JOBS
from benchmarks.to_target.process import ACCEL, MOST_TIMES
from benchmarks.turns import Command, take_turns

START = "x1"
SWEEP = [f"x{2**n}" for n in range(MOST_TIMES.bit_length())]
VARIANTS = [*SWEEP, *ACCEL]
TURN_S = 2.0
FASTER = 1.5
"""Than the starting batch accel is to be; and not slower than the best fixed one."""

RECORD = Record(
    "time-to-accuracy",
    "time of real jobs to a target score, by batch size",
    {
        "job": Column("what is trained"),
        "variant": Column("who chooses the batch"),
        "seed": Column("of weights and order"),
        "data": Column("in words"),
        "threads": Column("of torch"),
        "batch": Column("samples of the last step"),
        "reached": Column("whether the score came to the target"),
        "seconds": Column("to the target, without evaluations, s; or to the end without it"),
        "cpu_s": Column("processor time over the same, s"),
        "samples": Column("trained on"),
        "steps": Column("of the optimizer"),
        "score": Column("mean of the last evaluations"),
        "target": Column("of the score"),
        "unit": Column("of both"),
        "batches": Column("accel's changes of the batch"),
        "notes": Column("why accel did not change it any more"),
    },
    key=("job", "variant", "seed"),
)


class Comparison(NamedTuple):
    """A variant over the seeds; ratios are those of pairs with the same seed, above 1 where it is faster."""

    job: str
    variant: str
    seeds: int
    reached: int
    """Seeds that came to the target."""
    seconds: Spread
    samples: float
    steps: float
    batch: float
    against_start: Spread | None
    """None where one of the two missed the target in every seed."""
    against_best: Spread | None
    best: str
    """The best fixed batch."""


def compare(rows: Sequence[Row], clock: str = "seconds") -> list[Comparison]:
    """Return each job's variants, in order.

    Args:
        rows: of all seeds.
        clock: the column that is compared, `seconds` or `cpu_s`.
    """
    found = []
    for job in dict.fromkeys(row["job"] for row in rows):
        runs = {name: _of(rows, job, name) for name in VARIANTS}
        best = best_fixed(runs, clock)
        found += [_comparison(job, name, own, runs[START], best, runs, clock) for name, own in runs.items() if own]
    return found


def best_fixed(runs: dict[str, dict[int, Row]], clock: str = "seconds") -> str:
    """Return the fixed batch with the least time over the seeds of those that came to the target in all; or ''."""
    seeds = {seed for own in runs.values() for seed in own}
    whole = [name for name in SWEEP if seeds and all(s in runs[name] and runs[name][s]["reached"] for s in seeds)]
    return min(whole, key=lambda name: sum(row[clock] for row in runs[name].values()), default="")


def _of(rows: Iterable[Row], job: str, variant: str) -> dict[int, Row]:
    return {row["seed"]: row for row in rows if (row["job"], row["variant"]) == (job, variant)}


def _comparison(
    job: str,
    variant: str,
    own: dict[int, Row],
    start: dict[int, Row],
    best: str,
    runs: dict[str, dict[int, Row]],
    clock: str,
) -> Comparison:
    values = list(own.values())
    return Comparison(
        job=job,
        variant=variant,
        seeds=len(own),
        reached=sum(row["reached"] for row in values),
        seconds=extremes([row[clock] for row in values]),
        samples=statistics.median(row["samples"] for row in values),
        steps=statistics.median(row["steps"] for row in values),
        batch=statistics.median(row["batch"] for row in values),
        against_start=_ratio(start, own, clock),
        against_best=_ratio(runs[best], own, clock) if best else None,
        best=best,
    )


def _ratio(slow: dict[int, Row], fast: dict[int, Row], clock: str) -> Spread | None:
    pairs = [(slow[seed][clock], row[clock]) for seed, row in fast.items() if seed in slow and row["reached"]]
    return extremes([a / b for a, b in pairs]) if pairs and all(row["reached"] for row in slow.values()) else None


def table_block(result: Row) -> str:
    """Return the comparison as a table."""
    data = "; ".join(dict.fromkeys(f"{row['job']}: {row['data']}" for row in result["rows"]))
    targets = "; ".join(dict.fromkeys(f"{row['job']}: {row['target']:g} {row['unit']}" for row in result["rows"]))
    threads = ", ".join(str(count) for count in sorted({row["threads"] for row in result["rows"]}))
    head = (
        f"`{result['command']}`, {result['date']}, {result['machine']}, torch {result['torch']}. {data}. Targets: "
        f"{targets}, the mean of three evaluations in a row. Threads of torch: {threads}. Time without "
        "evaluations, with all that accel does; median over the seeds, ratios of pairs, lowest and highest. `x1` is "
        "the batch of the loop; the others' learning rates are scaled as accel scales them."
    )
    columns: dict[str, Cell] = {
        "job": "{job}",
        "batch": "{variant}",
        "reached": "{reached} of {seeds}",
        "time": "{seconds.median:.1f} s",
        "samples": "{samples:,.0f}",
        "steps": "{steps:,.0f}",
        "last batch": "{batch:.0f}",
        "against `x1`": lambda row: _times(row["against_start"]),
        "against the best fixed": lambda row: _against_best(row),
    }
    return block(head, columns, [found._asdict() for found in compare(result["rows"])])


def _times(spread: Spread | None) -> str | None:
    return None if spread is None else f"{spread.median:.2f}x [{spread.low:.2f}, {spread.high:.2f}]"


def _against_best(row: Row) -> str | None:
    shown = _times(row["against_best"])
    return None if shown is None else f"{shown} ({row['best']})"


def show(rows: Sequence[Row], clock: str) -> None:
    """Print the comparison, and whether accel is as fast as it is to be."""
    for found in compare(rows, clock):
        line = f"{found.job:7} {found.variant:20} {found.reached}/{found.seeds} {found.seconds.median:6.1f} s"
        line += f"  {found.samples:9,.0f} samples {found.steps:7,.0f} steps, batch {found.batch:4.0f}"
        line += f"; against x1 {_times(found.against_start) or '-'}, the best {_against_best(found._asdict()) or '-'}"
        if found.variant in ACCEL:
            line += f"; as wanted: {'yes' if as_wanted(found) else 'NO'}"
        click.echo(line)


def as_wanted(found: Comparison) -> bool:
    """Return whether a variant is 1.5 times as fast as the starting batch, and not slower than the best fixed one."""
    start, best = found.against_start, found.against_best
    is_whole = found.reached == found.seeds and start is not None and best is not None
    return is_whole and start.median >= FASTER and best.median >= 1.0  # type: ignore[union-attr]


def race(job: str, variants: Sequence[str], seed: int, threads: int, options: Sequence[str] = ()) -> list[Row]:
    """Run variants of one job and seed in turns, and return their rows."""
    options = [f"--threads={threads}", *options]
    start = ["-m", "benchmarks.turn_clock", str(TURN_S), "to_target.process", job]
    environ = {"OMP_NUM_THREADS": str(threads)}
    commands = [Command([*start, name, f"--seed={seed}", *options], environ) for name in variants]
    rows = []
    for name, done in zip(variants, take_turns(commands), strict=True):
        if done.returncode:
            raise click.ClickException(
                f"{job}, {name}, seed {seed} ended with {done.returncode}:\n{done.stderr[-3000:]}"
            )
        rows.append(row_of(json.loads(done.stdout.splitlines()[-1])))
    return rows


def row_of(outcome: dict[str, Any]) -> Row:
    """Return what is recorded of a run."""
    return {"unit": JOBS[outcome["job"]].unit, **{k: v for k, v in outcome.items() if k in RECORD.columns}}


@click.command()
@click.option("--job", "jobs", multiple=True, type=click.Choice(list(JOBS)), help="Only these jobs.")
@click.option("--variant", "variants", multiple=True, type=click.Choice(VARIANTS), help="Only these variants.")
@click.option("--seeds", default=3, show_default=True, help="Runs of each variant.")
@click.option("--threads", default=usable_cores(), show_default="one per core", help="Of torch in each run.")
@click.option("--short", is_flag=True, help="Targets that are reached in a few seconds: to see whether all works.")
@click.option("--cpu", is_flag=True, help="Compare processor time, which a busy machine hardly changes.")
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(
    jobs: tuple[str, ...],
    variants: tuple[str, ...],
    seeds: int,
    threads: int,
    short: bool,
    cpu: bool,
    record: bool,
) -> None:
    """Measure."""
    if record and short:
        raise click.UsageError("--record is for the real targets: leave out --short, got both")
    rows: list[Row] = []
    options = ["--short"] if short else []
    for job in jobs or JOBS:
        for seed in range(seeds):
            new = race(job, variants or VARIANTS, seed, threads, options)
            rows += new
            if record:
                RECORD.write(new)
    show(RECORD.rows() if record else rows, "cpu_s" if cpu else "seconds")


if __name__ == "__main__":
    main()
