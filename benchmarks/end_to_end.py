"""End to end: how many steps a whole process takes in the same time, plainly and with the one line.

    python -m benchmarks.end_to_end [MODEL …] [--seconds 60] [--pairs 3] [--allow reordered] [--record]

Each process begins with its imports and ends after so many seconds, so the search, its trials and the import of accel
count against the speed-up. Plain and accelerated processes take turns: A B B A.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from typing import Any

import click
import torch
from rich.console import Console

import accel
from benchmarks.record import ROOT, Column, Record
from benchmarks.render import SOURCE, Row
from benchmarks.spread import ratio
from benchmarks.suite import MODELS, Workload

RECORD = Record(
    "end-to-end",
    "steps of whole processes in the same time, accelerated ÷ plain, mean of interleaved pairs with 95 % interval",
    {
        "model": Column("by its name", "model"),
        "seconds": Column("of each process, its imports and the search included", "s", ":.0f"),
        "plain_steps": Column("median steps of a plain process", "plain steps", ":.0f"),
        "accel_steps": Column("median steps with the one line", "with accel", ":.0f"),
        "ratio": Column("of steps", "more steps [95 %]", "{ratio:.2f}x [{low:.2f}, {high:.2f}]"),
        "low": Column("of its 95 % interval"),
        "high": Column("of its 95 % interval"),
        "kept": Column(
            "strategies that stayed, in the last process", "kept", lambda row: ", ".join(row["kept"]) or "-"
        ),
    },
    head=f"{SOURCE}. Steps of a whole process in the same time, with the search and all imports.",
    key=("model", "seconds"),
)


def train(workload: Workload, until: float, allow: str | None) -> dict[str, Any]:
    """Train until that time of `time.time`, and return the steps and what was kept.

    Args:
        workload: what to train.
        until: when to stop.
        allow: of `accel.optimize`; None trains plainly.
    """
    model, loader, optimizer, loss, clip, beside = workload
    if allow is not None:
        model, loader, optimizer = accel.optimize(model, loader, optimizer, allow=allow, cache=False)
    steps = 0
    while time.time() < until:
        for x, target in loader:
            optimizer.zero_grad()
            loss(model(x), target).backward()  # type: ignore[no-untyped-call]
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if beside is not None:
                beside(target)
            steps += 1
            if time.time() >= until:
                break
    kept = [] if allow is None else [row.name for row in accel.explain(model).rows if row.status == "kept"]
    return {"steps": steps, "kept": kept}


def in_a_process(name: str, seconds: float, allow: str | None) -> dict[str, Any]:
    """Train for so many seconds in a process of its own, from its start."""
    options = [f"--until={time.time() + seconds}", *([f"--allow={allow}"] if allow else ["--plain"])]
    command = [sys.executable, "-m", "benchmarks.end_to_end", name, *options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(name: str, seconds: float, pairs: int, allow: str) -> Row:
    """Run plain and accelerated processes in turns."""
    steps: dict[bool, list[int]] = {False: [], True: []}
    kept: list[str] = []
    for pair in range(pairs):
        for accelerated in (False, True) if pair % 2 == 0 else (True, False):
            found = in_a_process(name, seconds, allow if accelerated else None)
            steps[accelerated].append(max(found["steps"], 1))
            kept = found["kept"] if accelerated else kept
    measured = ratio(*([[one] for one in steps[side]] for side in (True, False)))
    return {
        "model": name,
        "seconds": seconds,
        "plain_steps": statistics.median(steps[False]),
        "accel_steps": statistics.median(steps[True]),
        "ratio": measured.value,
        "low": measured.low,
        "high": measured.high,
        "kept": kept,
    }


@click.command()
@click.argument("models", nargs=-1, type=click.Choice(sorted(MODELS)))
@click.option("--seconds", default=60.0, show_default=True, help="Of each process.")
@click.option("--pairs", default=3, show_default=True, type=click.IntRange(2), help="Processes of each kind.")
@click.option("--allow", default="reordered", show_default=True)
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
@click.option("--until", type=float, hidden=True)
@click.option("--plain", is_flag=True, hidden=True)
def main(
    models: tuple[str, ...], seconds: float, pairs: int, allow: str, record: bool, until: float | None, plain: bool
) -> None:
    """Compare whole processes that train MODELS (default: all)."""
    if until is not None:  # one of the processes
        torch.manual_seed(0)
        click.echo(json.dumps(train(MODELS[models[0]]("tiny"), until, None if plain else allow)))
        return
    console = Console(highlight=False, soft_wrap=True)
    rows = []
    for name in models or MODELS:
        rows.append(compare(name, seconds, pairs, allow))
        line = "{model:6} {plain_steps:6.0f} → {accel_steps:6.0f} steps in {seconds:.0f} s, {ratio:.2f}x "
        console.print(
            (line + "[{low:.2f}, {high:.2f}], kept {words}").format_map(
                {**rows[-1], "words": ", ".join(rows[-1]["kept"]) or "nothing"}
            )
        )
    if record:
        RECORD.write(rows)


if __name__ == "__main__":
    main()
