"""`make demo`: train a small CNN on real images, plain and accelerated side by side, and show what it gave.

    python -m benchmarks.demo [--full] [--data FOLDER] [--out runs/demo] [--record]

Three variants of the same script run in turns: plain, `accel.optimize(model, loader, optimizer, budget=5)`, and the
same with `allow="reduced"`. `make demo` trains each for one epoch or as far as it gets in 75 s, so that it ends within
two minutes on a busy machine too; `make demo-full` trains two seeds for two epochs, and can be recorded. The default
budget of 3 % would be two seconds of such a run, in which a search tries little. Each search starts from scratch, as in
a first run (`cache=False`). Speed-ups are ratios of neighbouring turns, after each search has ended or had 20 s. What
is promised depends on the machine, see `demo_promise`. The last line says whether that was kept, by what it was missed
and what to do then. The exit status is 1 if figures show that it was missed.
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
from benchmarks.demo_promise import Promise, elsewhere, kept, processor, promise, record_name, wanted_text
from benchmarks.loading.data import load
from benchmarks.loops.demo import train
from benchmarks.pairs import Racer, racers
from benchmarks.record import save
from benchmarks.render import Cell, Row, block, table, times
from benchmarks.spread import Ratio, ratio

TURN = 10
TRAINING_S = 75.0
"""How long all variants train together without --full."""
SEARCH_S = 20.0
"""How long a search may have the machine for itself then."""
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
    """Train plainly and accelerated, side by side; exit with 1 if the speed-ups or accuracies are not as promised."""
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
    limits = (math.inf, math.inf) if full else (TRAINING_S, SEARCH_S)
    runs = [_race(seed, epochs, data, out, console, *limits) for seed in range(seeds)]
    summary = _summarise(runs, found.source, promised)
    _show(console, summary, runs)
    console.print(f"demo took {time.perf_counter() - began:.0f} s; each step of the search: {out}/default/report.html")
    if record:
        console.print(f"recorded in {save(record_name(processor()), summary).name}")
    console.print(_verdict(summary))
    sys.exit(int(summary["passed"] is False))


def _race(
    seed: int, epochs: int, data: str | None, out: str, console: Console, training_s: float, search_s: float
) -> dict[str, Racer]:
    """Train all variants with one seed, each search first, then all in turns, until the time is over."""
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

        def turn(name: str, state: str, steps: int = TURN) -> None:
            progress.update(bars[name], advance=len(field[name].run(steps)), state=state)

        for name in field:
            turn(name, "starting", 1)
        began = time.perf_counter()
        for number, name in enumerate(ACCELERATED, start=1):
            # A search alone on the machine: waiting for others' turns is no step time.
            while field[name].info != "done" and not field[name].done:
                turn(name, "searching")
                if time.perf_counter() - began > number * search_s:
                    break
        for racer in field.values():
            racer.turns.clear()
        order = list(field)
        while not all(racer.done for racer in field.values()):
            left_s = began + training_s - time.perf_counter()
            for name in order:
                turn(name, "side by side" if not field[name].done else "done", TURN if left_s > 0 else 0)
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
    for name in ACCELERATED:
        figures = _figures(name, runs)
        figures["accuracy"] = accuracies[name]
        figures["accuracy_difference"] = statistics.fmean(accuracies[name]) - statistics.fmean(accuracies["plain"])
        figures["wanted"] = promised.speedups[name]
        summary["variants"][name] = figures
    _judge(summary, len(runs), is_cut=_is_cut(runs))
    return summary


def _judge(summary: dict[str, Any], seeds: int, *, is_cut: bool) -> None:
    """Set whether all is as promised, None where a search had no verdict, and what is missing."""
    missed, open_ = _missed(summary, seeds, is_cut=is_cut), _open(summary)
    summary["passed"], summary["missed"] = None if open_ else not missed, open_ or missed


def _is_cut(runs: list[dict[str, Racer]]) -> bool:
    """Tell whether the time was over before the training: variants have other numbers of steps, and of accuracies."""
    return len({len(racer.result["losses"]) for run in runs for racer in run.values()}) > 1


def _open(summary: dict[str, Any]) -> str:
    """Name the variants whose search had no verdict in time, with what they were at by then; '' if there is none."""
    variants = {name: summary["variants"][name] for name in ACCELERATED}
    found = [name for name, figures in variants.items() if not figures["pairs"]]
    found += [name for name, figures in variants.items() if name not in found and None in figures["reported"]]
    told = ", ".join(f"{name} ({_speedup(variants[name])} so far)" for name in found)
    return f"the search had no verdict in time: {told}" if told else ""


def _missed(summary: dict[str, Any], seeds: int, *, is_cut: bool) -> str:
    """Say what is not as promised; '' if all is."""
    said = []
    for name in ACCELERATED:
        figures = summary["variants"][name]
        if not kept(figures):
            said.append(f"{name} {_speedup(figures)}, promised {wanted_text(figures['wanted'])}")
        if not is_cut and abs(figures["accuracy_difference"]) > _band(seeds):
            said.append(f"{name} accuracy {figures['accuracy_difference']:+.2f}, promised ±{_band(seeds):.1f}")
    return "; ".join(said)


def _verdict(summary: dict[str, Any]) -> str:
    """Say in a sentence whether all was as promised, or by what it was missed and what to do then."""
    if summary["passed"]:
        return f"as promised for {summary['promised_for']}: yes"
    head = "no verdict" if summary["passed"] is None else f"as promised for {summary['promised_for']}: NO"
    return f"{head}: {summary['missed']}. Next: run it while nothing else does, or make demo-full, of five minutes"


def _speedup(figures: dict[str, Any]) -> str:
    if not figures["pairs"]:
        return "nothing timed"
    return str(Ratio(figures["speedup"], figures["low"], figures["high"], figures["pairs"]))


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


def _show(console: Console, summary: dict[str, Any], runs: list[dict[str, Racer]]) -> None:
    console.rule("side by side")
    shown = Table(
        "variant", "speed-up", "by its report", "ms per step", "search", "test accuracy", "promised", box=None
    )
    is_cut = _is_cut(runs)
    plain = summary["variants"]["plain"]["accuracy"]
    accuracy = "not trained to the end" if is_cut else _percent(plain)
    shown.add_row("plain", "1", "", _ms(summary["variants"]["default"]["plain_ms"]), "", accuracy, "")
    for name in ACCELERATED:
        found = summary["variants"][name]
        shown.add_row(
            name,
            _speedup(found),
            ", ".join("none" if told is None else f"{told:.2f}x" for told in found["reported"]),
            _ms(found["ms"]),
            f"{statistics.fmean(found['search_s']):.1f} s",
            "" if is_cut else f"{_percent(found['accuracy'])} ({found['accuracy_difference']:+.2f})",
            wanted_text(found["wanted"]) + ("" if is_cut else f", ±{_band(len(runs)):.1f}"),
        )
    console.print(shown)
    for line in elsewhere():
        console.print(f"recorded before: {line}")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(values: list[float]) -> str:
    return f"{statistics.fmean(values):.2f} %"


if __name__ == "__main__":
    main()
