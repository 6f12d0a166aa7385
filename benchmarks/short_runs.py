"""Short runs: how much longer a process takes for the same steps when a first search has hardly time to win anything.

    python -m benchmarks.short_runs [MODEL …] [--seconds 20] [--load quiet] [--rounds 1] [--record]

Each process begins with its imports and an empty cache, and takes turns with a plain one, as in
`benchmarks.end_to_end`: once on a quiet machine, and once while other processes keep half of the cores busy. What is
recorded of other models and lengths stays, so that a recording may be made in parts.
"""

from __future__ import annotations

import sys

import click
from rich.console import Console

from accel.profiler.host import usable_cores
from benchmarks.end_to_end import Job, compare
from benchmarks.faults.runs import busy
from benchmarks.record import Column, Record
from benchmarks.render import SOURCE, Row
from benchmarks.suite import MODELS

LIMIT = 1.03
"""A run may take this many times as long as the plain one."""

LOADS = ("quiet", "half busy")

RECORD = Record(
    "short-runs",
    "time of whole short processes with accel ÷ that of plain ones that took turns with them",
    {
        "model": Column("by its name", "model"),
        "seconds": Column("of each process, imports and search included", "s", ":.0f"),
        "load": Column('"quiet", or "half busy": other processes keep half of the cores busy', "machine"),
        "plain_steps": Column("mean steps of a plain process in that time", "plain steps", ":.0f"),
        "longer": Column(
            "time for the same steps ÷ plain", "accelerated ÷ plain [95 %]", "{longer:.3f} [{low:.3f}, {high:.3f}]"
        ),
        "low": Column("of its 95 % interval"),
        "high": Column("of its 95 % interval"),
        "kept": Column("strategies that stayed", "kept", lambda row: ", ".join(row["kept"]) or "-"),
    },
    head=f"{SOURCE}. First runs, imports and search included: time for as many steps as a plain process ÷ its time; "
    f"below 1 is faster; limit {LIMIT}.",
    key=("model", "seconds", "load"),
)


def measure(job: Job, load: str, rounds: int) -> Row:
    """Run a model's first run beside a plain one, and return its row."""
    with busy(max(1, usable_cores() // 2) if load == "half busy" else 0, 10 * rounds * job.seconds):
        ((row, _),) = compare(job, ["first"], rounds)
    return {
        "model": job.model,
        "seconds": job.seconds,
        "load": load,
        "plain_steps": row["plain_steps"],
        "longer": 1 / row["ratio"],
        "low": 1 / row["high"],
        "high": 1 / row["low"],
        "kept": row["kept"],
    }


@click.command()
@click.argument("models", nargs=-1, type=click.Choice(sorted(MODELS)))
@click.option("--seconds", "lengths", multiple=True, default=(20.0,), show_default=True, help="Of each process.")
@click.option("--load", "loads", multiple=True, type=click.Choice(LOADS), default=LOADS, help="Of the machine.")
@click.option("--rounds", default=1, show_default=True, type=click.IntRange(1), help="Processes of each kind.")
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/, after each row.")
def main(
    models: tuple[str, ...], lengths: tuple[float, ...], loads: tuple[str, ...], rounds: int, record: bool
) -> None:
    """Compare short runs of MODELS (default: all); exit with 1 if one is shown to be longer than the limit."""
    console = Console(highlight=False, soft_wrap=True)
    longer = False
    for seconds in lengths:
        for model in models or MODELS:
            for load in loads:
                row = measure(Job(model, "tiny", "synthetic", seconds, 0.0, "reordered"), load, rounds)
                longer = longer or row["low"] > LIMIT
                line = "{model:7} {seconds:.0f} s, {load}: {longer:.3f} [{low:.3f}, {high:.3f}] of plain"
                console.print(line.format_map(row), markup=False)
                if record:
                    RECORD.write([row])
    sys.exit(longer)


if __name__ == "__main__":
    main()
