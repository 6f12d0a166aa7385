"""What it costs to change the ranks of a running job: all started anew, or those that stay kept (`LocalJob`).

    python -m benchmarks.resizing [--rounds 5] [--record]

The job is that of `benchmarks.recovery`, in steps of some 25 ms. It grows from one rank to two, and shrinks again.
Counted are the longest time without the end of a step of any rank, and the time from the call until all ranks that are
to be have ended a step together.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console

from accel.elastic.local_job import LocalJob
from benchmarks.record import Column, Record
from benchmarks.recovery import Workers
from benchmarks.render import SOURCE, Row

_STEPS = 40
"""Of all ranks before a change."""
WAYS = {"anew": "all ranks started anew", "in place": "ranks that stay kept"}

RECORD = Record(
    "resizing",
    "what it costs to change the ranks of a running job",
    {
        "way": Column("how it is changed", "changed with"),
        "change": Column("ranks before and after", "ranks"),
        "rounds": Column("times that it was changed", "times"),
        "kept": Column("of these, how often processes were kept", "processes kept"),
        "gap_s": Column("longest time without a step's end, median", "without a step, s", "{gap_s:.2f} {gap}"),
        "gap": Column("least and most"),
        "whole_s": Column("from the call until all ranks step, median", "all ranks, s", "{whole_s:.2f} {whole}"),
        "whole": Column("least and most"),
        "repeated": Column("steps done twice, most", "steps done twice", ":.0f"),
    },
    key=("way", "change"),
    head=f"{SOURCE}. `LocalJob.resize` of a job of small steps; median, least and most.",
)


class Change(NamedTuple):
    """What a change of ranks cost."""

    kept: bool
    gap_s: float
    whole_s: float
    repeated: int


def change(job: LocalJob, workers: Workers, ranks: int) -> Change:
    """Let a running job go on with so many ranks, and return what that cost."""
    called = time.time()
    job.resize(ranks)
    whole = workers.wait_for(ranks, 1, since=called)
    lines = [line for own in workers.steps().values() for line in own]
    ends = sorted(line["at"] for line in lines if called - 1.0 <= line["at"] <= whole)
    gap_s = max(later - earlier for earlier, later in itertools.pairwise(ends))
    before = max(line["step"] for line in lines if line["world"] != ranks)
    again = min(line["step"] for line in lines if line["world"] == ranks and line["at"] > called)
    return Change(job.kept, gap_s, whole - called, max(0, before - again + 1))


def changes(way: str, rounds: int) -> dict[str, list[Change]]:
    """Let a job grow and shrink some times, and return what each change cost."""
    found: dict[str, list[Change]] = {"1 to 2": [], "2 to 1": []}
    with tempfile.TemporaryDirectory() as name:
        workers = Workers(Path(name))
        arguments = ["-m", "benchmarks.recovery_worker", "accel", name]
        job = LocalJob(arguments, Path(name) / "checkpoints", in_place=way == "in place")
        try:
            began = time.time()
            job.resize(1)
            for _ in range(rounds):
                for ranks, kind in ((2, "1 to 2"), (1, "2 to 1")):
                    workers.wait_for(3 - ranks, _STEPS, since=began)
                    began = time.time()
                    found[kind].append(change(job, workers, ranks))
        finally:
            job.kill()
    return found


def rows_of(way: str, found: dict[str, list[Change]]) -> list[Row]:
    """Return the rows of a way."""
    return [_row_of(WAYS[way], kind, each) for kind, each in found.items()]


def _row_of(way: str, kind: str, found: list[Change]) -> Row:
    gaps, wholes = sorted(each.gap_s for each in found), sorted(each.whole_s for each in found)
    return {
        "way": way,
        "change": kind,
        "rounds": len(found),
        "kept": sum(each.kept for each in found),
        "gap_s": statistics.median(gaps),
        "gap": f"[{gaps[0]:.2f}, {gaps[-1]:.2f}]",
        "whole_s": statistics.median(wholes),
        "whole": f"[{wholes[0]:.2f}, {wholes[-1]:.2f}]",
        "repeated": max(each.repeated for each in found),
    }


@click.command()
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(rounds: int, record: bool) -> None:
    """Change the ranks of running jobs."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    console, rows = Console(highlight=False, soft_wrap=True), list[Row]()
    for way in WAYS:
        new = rows_of(way, changes(way, rounds))
        rows += new
        for row in new:
            console.print(
                "{way}, {change}: {gap_s:.2f} s {gap} without a step, {whole_s:.2f} s {whole}".format_map(row)
            )
    if record:
        RECORD.write(rows)


if __name__ == "__main__":
    main()
