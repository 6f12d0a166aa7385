"""`make demo`: train a small CNN on real images, plain and accelerated side by side, and show what it gave.

    python -m benchmarks.demo [--full] [--data FOLDER] [--out runs/demo] [--record]

Three variants of the same script run in turns: plain, `accel.optimize(model, loader, optimizer, budget=5)`, and the
same with `allow="reduced"`. `make demo` trains each for one epoch, under two minutes in all; `make demo-full` trains
two seeds for two epochs, and can be recorded. The default budget of 3 % would be two seconds of such a run, in which a
search tries little. Each search starts from scratch, as in a first run (`cache=False`). Speed-ups are ratios of
neighbouring turns after each search has ended. What is promised depends on the machine, see `demo_promise`. The last
line says whether that was kept, and so does the exit status: 1 if not.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from accel.profiler.host import usable_cores
from accel.report import Report
from benchmarks.demo_promise import Promise, elsewhere, kept, processor, promise, record_name, wanted_text
from benchmarks.loading.data import load
from benchmarks.loops.demo import train
from benchmarks.pairs import Racer, racers
from benchmarks.record import save
from benchmarks.render import Cell, Row, block, table, times
from benchmarks.spread import Ratio, ratio

TURN = 10
BATCH = 64
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "default": {"allow": "reordered", "budget": 5},
    "reduced": {"allow": "reduced", "budget": 5},
}
ACCELERATED = [name for name, arguments in VARIANTS.items() if arguments is not None]
ACCURACY_BAND = 0.5
"""Percentage points that the mean accuracy of two seeds may differ by; one seed may by √2 times as many."""


@click.command()
@click.option("--full", is_flag=True, help="Two seeds for two epochs each, in place of one for one.")
@click.option("--data", default=None, help="Folder with the four Fashion-MNIST files.")
@click.option("--out", default="runs/demo", show_default=True, help="Where the report, its page and the plan go.")
@click.option("--record", is_flag=True, help="Also write the figures to benchmarks/results/.")
def main(full: bool, data: str | None, out: str, record: bool) -> None:
    """Train plainly and accelerated, side by side; exit with 1 unless the speed-ups and accuracies are as promised."""
    if record and not full:
        raise click.UsageError("--record needs --full: one seed of one epoch is no figure")
    seeds = epochs = 2 if full else 1
    console = Console(highlight=False, soft_wrap=True)
    began = time.perf_counter()
    found = load(data)
    console.print(
        f"data: {found.source}, {len(found.train):,} training images; "
        f"{len(VARIANTS)} variants of a script, {seeds * epochs} epoch{'s' if full else ''} each"
    )
    promised = promise(usable_cores(), processor())
    wanted = ", ".join(f"{name} {wanted_text(value)}" for name, value in promised.speedups.items())
    console.print(f"promised for {promised.machine}: {wanted}")
    console.print(
        "each search starts from scratch and may cost 5 s (budget=5): the default, 3 % of a run, is too little here"
    )
    runs = [_race(seed, epochs, data, out, console) for seed in range(seeds)]
    summary = _summarise(runs, found.source, promised)
    _show(console, summary, runs, out)
    console.print(f"demo took {time.perf_counter() - began:.0f} s; reports in {out}/default and {out}/reduced")
    if record:
        console.print(f"recorded in {save(record_name(processor()), summary).name}")
    console.print(f"as promised for {promised.machine}: {'yes' if summary['passed'] else 'NO'}")
    if not summary["passed"]:
        sys.exit(1)


def _race(seed: int, epochs: int, data: str | None, out: str, console: Console) -> dict[str, Racer]:
    """Train all variants with one seed, each search first, then all in turns."""
    variants = {}
    for name, arguments in VARIANTS.items():
        options = None if arguments is None else {**arguments, "report": str(Path(out) / name)}
        variants[name] = (
            train,
            {"seed": seed, "accelerate": options, "folder": data, "batch_size": BATCH, "epochs": epochs},
        )
    columns = (
        TextColumn("seed {task.fields[seed]} {task.description:>8}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
    )
    total = epochs * (len(load(data).train) // BATCH)
    with racers(variants) as field, Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bars = {name: progress.add_task(name, total=total, seed=seed, state="waiting") for name in field}

        def turn(name: str, state: str) -> None:
            progress.update(bars[name], advance=len(field[name].run(TURN)), state=state)

        for name in ACCELERATED:  # a search alone on the machine: waiting for others' turns is no step time
            while field[name].info != "done" and not field[name].done:
                turn(name, "searching")
            field[name].turns.clear()
        order = list(field)
        while not all(racer.done for racer in field.values()):
            for name in order:
                turn(name, "side by side" if not field[name].done else "done")
            order.reverse()
        return dict(field)


def _summarise(runs: list[dict[str, Racer]], source: str, promised: Promise) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "what": "small CNN on 28x28 images, batch 64, two epochs, budget=5, mean of interleaved pairs after the search",
        "command": "make demo-full",
        "data": source,
        "date": date.today().isoformat(),
        "machine": json.loads(runs[0]["default"].result["report"])["machine"],
        "processor": str(processor()),
        "promised_for": promised.machine,
        "python": platform.python_version(),
        "variants": {},
    }
    accuracies = {name: [run[name].result["accuracy"] for run in runs] for name in VARIANTS}
    summary["variants"]["plain"] = {"accuracy": accuracies["plain"]}
    passed = True
    for name in ACCELERATED:
        figures = _figures(name, runs)
        figures["accuracy"] = accuracies[name]
        figures["accuracy_difference"] = statistics.fmean(accuracies[name]) - statistics.fmean(accuracies["plain"])
        figures["wanted"] = promised.speedups[name]
        summary["variants"][name] = figures
        passed &= kept(figures) and abs(figures["accuracy_difference"]) <= _band(len(runs))
    summary["passed"] = bool(passed)
    return summary


def _band(seeds: int) -> float:
    return ACCURACY_BAND * math.sqrt(2 / seeds)


def _figures(name: str, runs: list[dict[str, Racer]]) -> dict[str, Any]:
    pairs = [pair for run in runs for pair in zip(run["plain"].turns, run[name].turns, strict=False)]
    slow, fast = [a for a, _ in pairs], [b for _, b in pairs]
    reports = [json.loads(run[name].result["report"]) for run in runs]
    measured = ratio(slow, fast) if len(fast) > 1 else Ratio(1.0, 0.0, 0.0, 0)
    plain_ms = statistics.median(t for turn in slow for t in turn) * 1e3 if slow else None
    return {
        "speedup": measured.value,
        "low": measured.low,
        "high": measured.high,
        "pairs": measured.pairs,
        "plain_ms": plain_ms,
        # By the ratio of neighbouring turns: two medians over a run that drifts have another.
        "ms": plain_ms / measured.value if plain_ms is not None else None,
        "search_s": [report["search_s"] for report in reports],
        "break_even_step": [report["break_even_step"] for report in reports],
        "reported": [report["speedup"] for report in reports],
        "strategies": [_kept(report) for report in reports],
    }


def _kept(report: dict[str, Any]) -> dict[str, Any]:
    keys = ("status", "setting", "gain", "gain_low", "gain_high", "gradient_error")
    return {row["name"]: {key: row[key] for key in keys} for row in report["rows"] if row["gain"] is not None}


def table_block(result: Row) -> str:
    """Return the demo's table."""
    variants = result["variants"]
    head = (
        "`{command}`, {date}, {machine[device]} {processor}, {machine[cores]} cores, torch {machine[torch]}. "
        "{data}; {what}."
    ).format_map(result)
    columns: dict[str, Cell] = {
        "variant": "{variant}",
        "speed-up [95 %]": lambda row: times("speedup", "low", "high").format_map(row) if "speedup" in row else "1",
        "ms per step": "{ms:.1f}",
        "search cost": lambda row: f"{statistics.fmean(row['search_s']):.1f} s" if "search_s" in row else None,
        f"test accuracy, mean of {len(variants['plain']['accuracy'])}": _accuracy,
        "promised": lambda row: f"{wanted_text(row['wanted'])}, ±0.5" if "wanted" in row else None,
    }
    rows = [
        {**variants["plain"], "variant": "plain", "ms": variants["default"]["plain_ms"]},
        {**variants["default"], "variant": '`allow="reordered"`'},
        {**variants["reduced"], "variant": '`allow="reduced"`'},
    ]
    return "\n".join([block(head, columns, rows), "", *_strategies(variants["reduced"]["strategies"])])


def _accuracy(row: Row) -> str:
    more = f" ({row['accuracy_difference']:+.2f})" if "accuracy_difference" in row else ""
    return f"{statistics.fmean(row['accuracy']):.2f} %{more}"


def _strategies(seeds: list[dict[str, Row]]) -> list[str]:
    """Return a row for each strategy that had a trial under `allow="reduced"`, over the seeds."""
    gain = times("gain").format_map
    columns: dict[str, Cell] = {
        "strategy": "`{name}`",
        "gain in its own trial, per seed": lambda row: ", ".join(map(gain, row["trials"])),
        "verdict": lambda row: ", ".join(trial["status"] for trial in row["trials"]),
    }
    names = sorted({name for seed in seeds for name in seed})
    return table(columns, ({"name": name, "trials": [seed[name] for seed in seeds if name in seed]} for name in names))


def _show(console: Console, summary: dict[str, Any], runs: list[dict[str, Racer]], out: str) -> None:
    for name in ACCELERATED:
        report_file = Path(out) / name / "report.json"
        if report_file.exists():
            console.rule(f"accel report, {name}, last seed")
            print(Report.load(report_file))
    console.rule("side by side")
    shown = Table("variant", "speed-up", "by its reports", "ms per step", "search", "test accuracy", "wanted", box=None)
    plain = summary["variants"]["plain"]["accuracy"]
    shown.add_row("plain", "1", "", _ms(summary["variants"]["default"]["plain_ms"]), "", _percent(plain), "")
    for name in ACCELERATED:
        found = summary["variants"][name]
        shown.add_row(
            name,
            str(Ratio(found["speedup"], found["low"], found["high"], found["pairs"]))
            if found["pairs"]
            else "no verdict",
            ", ".join("none" if told is None else f"{told:.2f}x" for told in found["reported"]),
            _ms(found["ms"]),
            f"{statistics.fmean(found['search_s']):.1f} s",
            f"{_percent(found['accuracy'])} ({found['accuracy_difference']:+.2f})",
            f"{wanted_text(found['wanted'])}, ±{_band(len(runs)):.1f}",
        )
    console.print(shown)
    if not all(summary["variants"][name]["pairs"] for name in ACCELERATED):
        console.print("no verdict: the training ended before its search; try a quieter machine, or make demo-full")
    for line in elsewhere():
        console.print(f"recorded before: {line}")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(values: list[float]) -> str:
    return f"{statistics.fmean(values):.2f} %"


if __name__ == "__main__":
    main()
