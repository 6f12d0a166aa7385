"""The step-time model and the efficiency model against profiles that others measured.

    python -m benchmarks.pollux [--data .data/pollux_osdi21] [--record]

Step times: of each table, the mean relative error of a fit to all rows, and that of a fit to the rows with at most 8
GPUs on those with more; beside it Pollux's form of the model, fitted by the same loss. Fit times are processor time of
one thread: of a whole table, and of 60 configurations from it, what a running job refits from, with an earlier model to
start from. Efficiency: the steps that a run at 32 times the base batch needs, predicted from the noise scale at the
base batch, over those that it took; see benchmarks/goodput/iterations.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean

import click
import numpy as np

from accel.goodput.efficiency import UNMEASURED_SHARE
from accel.goodput.fit import fit_throughput
from accel.goodput.observations import StepTimes
from accel.goodput.throughput import Floats, ThroughputModel
from benchmarks.goodput.iterations import Application, measured_share, predicted_over_real, share_of_others, usable
from benchmarks.goodput.pollux_form import fit_pollux_form, predicted
from benchmarks.goodput.profiles import Table, data_option, runs, tables
from benchmarks.record import Column, Record
from benchmarks.render import SOURCE, Row
from benchmarks.spread import fifths

FEW = 8
"""GPUs up to which the extrapolation is fitted."""
ONLINE = 60
"""Configurations of a refit."""
SCALE = 32

STEP_TIMES = Record(
    "pollux-step-times",
    "errors of the step-time model on measured tables, and the time of its fit",
    {
        "table": Column("application and GPU", "table"),
        "rows": Column("step times in the table", "rows", ":,.0f"),
        "fit": Column("mean relative error of the fit to all rows, %", "error", "{fit:.1f} %"),
        "extrapolation": Column(
            "that of a fit to at most 8 GPUs, on the rows with more, %", "8 GPUs to more", "{extrapolation:.1f} %"
        ),
        "pollux_fit": Column("as fit, of Pollux's form", "Pollux's form", "{pollux_fit:.1f} %"),
        "pollux_extrapolation": Column(
            "as extrapolation, of Pollux's form", "its 8 to more", "{pollux_extrapolation:.1f} %"
        ),
        "fit_ms": Column("processor time of the fit to all rows, ms", "fit", "{fit_ms:.0f} ms"),
        "refit_ms": Column(
            "processor time of a fit of 60 configurations, ms, median of the rounds",
            "60 configurations",
            "{refit_ms:.1f} ms [{refit_p20:.1f}, {refit_p80:.1f}]",
        ),
        "refit_p20": Column("20th percentile of the rounds"),
        "refit_p80": Column("80th percentile of the rounds"),
        "started_ms": Column(
            "the same with the model of 50 of them to start from",
            "60 after 50",
            "{started_ms:.1f} ms [{started_p20:.1f}, {started_p80:.1f}]",
        ),
        "started_p20": Column("20th percentile of the rounds"),
        "started_p80": Column("80th percentile of the rounds"),
    },
    head=f"{SOURCE}. Mean relative error of the step time; fit times are processor time of one thread.",
)
STEPS = Record(
    "pollux-steps",
    "steps at 32 times the base batch, predicted from noise scales measured at smaller ones, over the run's own count",
    {
        "application": Column("with runs at 32 times the base batch", "application"),
        "noise": Column("as recorded, or with the second epoch's for the first", "noise"),
        "plain": Column("predicted from the noise at the base batch", "by φ(M0)", ":.2f"),
        "others_share": Column(
            "share of oscillation that suits the other applications best", "share of others", ":.2f"
        ),
        "others": Column("predicted with that share", "by share of others", ":.2f"),
        "half": Column("predicted with the share that is taken while none is known", "by one half", ":.2f"),
        "median_share": Column("median of the shares measured at M0 and 2 M0", "own share", ":.2f"),
        "own": Column("predicted with the shares measured so far", "by own share", ":.2f"),
        "own_least": Column("least of that ratio over all batches of the application"),
        "own_most": Column("most over all batches", "all batches", "{own_least:.2f} to {own_most:.2f}"),
    },
    head=f"{SOURCE}. Predicted steps ÷ the run's own, at 32 × M0.",
)


def error(times: StepTimes, seconds: Floats) -> float:
    """Return the mean relative error of predicted step times, %."""
    return float(np.mean(np.abs(seconds / times.seconds - 1)) * 100)


def by_model(model: ThroughputModel, times: StepTimes) -> float:
    """Return the error of a model, %."""
    return error(times, model.step_s(times.nodes, times.replicas, times.local_batch, times.accumulation))


def by_pollux_form(fitted: StepTimes, asked: StepTimes) -> float:
    """Return the error of Pollux's form, fitted to some rows and asked about others, %."""
    return error(asked, np.exp(predicted(fit_pollux_form(fitted), asked)))


def milliseconds(fit: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the time of a fit, ms."""
    began = clock()
    fit()
    return (clock() - began) * 1e3


def judge(table: Table, rounds: int, clock: Callable[[], float] = time.process_time) -> Row:
    """Return the row of a table."""
    whole, few, many = table.all(), table.up_to(FEW), table.above(FEW)
    online, started = [], []
    for seed in range(rounds):
        times, earlier = table.drawn(ONLINE, seed), fit_throughput(table.drawn(ONLINE - 10, seed))
        online.append(milliseconds(partial(fit_throughput, times), clock))
        started.append(milliseconds(partial(fit_throughput, times, earlier), clock))
    return {
        "table": f"{table.application}, {table.gpu}",
        "rows": len(table.configurations),
        "fit": by_model(fit_throughput(whole), whole),
        "extrapolation": by_model(fit_throughput(few), many),
        "pollux_fit": by_pollux_form(whole, whole),
        "pollux_extrapolation": by_pollux_form(few, many),
        "fit_ms": milliseconds(lambda: fit_throughput(whole), clock),
        **fifths(online).named("refit_ms", "refit_p20", "refit_p80"),
        **fifths(started).named("started_ms", "started_p20", "started_p80"),
    }


def average(rows: list[Row]) -> Row:
    """Return the row of the means."""
    return {"table": "mean", **{name: mean(row[name] for row in rows) for name in rows[0] if name != "table"}}


def count_steps(folder: Path, names: Iterable[str]) -> Iterator[Row]:
    """Yield the rows of predicted steps: each application with its noise as recorded, then each without the first
    epoch's."""
    recorded = {name: runs(folder, name) for name in names}
    for clean in (False, True):
        applications = {name: Application(each, clean) for name, each in recorded.items() if usable(each)}
        for name, application in applications.items():
            yield count_steps_of(application, name, share_of_others(applications, name))


def count_steps_of(application: Application, name: str, others: float) -> Row:
    """Return the row of an application."""
    base, own = application.runs[0].batch, measured_share(application)
    ratios = {run.batch // base: predicted_over_real(application, run, own) for run in application.runs[1:]}
    large = next(run for run in application.runs if run.batch == SCALE * base)
    return {
        "application": name,
        "noise": "second epoch's for the first" if application.clean else "as recorded",
        "plain": predicted_over_real(application, large, lambda _: 0.0),
        "others_share": others,
        "others": predicted_over_real(application, large, lambda _: others),
        "half": predicted_over_real(application, large, lambda _: UNMEASURED_SHARE),
        "median_share": float(np.median([own(epoch) for epoch in range(len(large.steps))])),
        "own": ratios[SCALE],
        "own_least": min(ratios.values()),
        "own_most": max(ratios.values()),
    }


@click.command()
@data_option
@click.option("--rounds", default=20, show_default=True, help="Refits timed for each table.")
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(data: Path, rounds: int, record: bool) -> None:
    """Measure."""
    measured = list(tables(data))
    rows = []
    for table in measured:
        rows.append(judge(table, rounds))
        print(LINE.format_map(rows[-1]))
    rows.append(average(rows))
    print(LINE.format_map(rows[-1]))
    steps = list(count_steps(data, dict.fromkeys(table.application for table in measured)))
    for row in steps:
        print(STEPS_LINE.format_map(row))
    if record:
        STEP_TIMES.write(rows)
        STEPS.write(steps)


LINE = (
    "{table:16} {rows:6,.0f} rows: error {fit:4.1f} %, 8 GPUs to more {extrapolation:4.1f} %; Pollux's form "
    "{pollux_fit:4.1f} %, {pollux_extrapolation:4.1f} %; fit {fit_ms:.0f} ms, of 60 configurations {refit_ms:.1f} ms "
    "[{refit_p20:.1f}, {refit_p80:.1f}], after 50 {started_ms:.1f} ms [{started_p20:.1f}, {started_p80:.1f}]"
)
STEPS_LINE = (
    "{application:12} noise {noise:28}: steps at 32x {plain:.2f} of the run's; share of others {others_share:.2f}: "
    "{others:.2f}; own share {median_share:.2f}: {own:.2f}, all batches {own_least:.2f} to {own_most:.2f}"
)

if __name__ == "__main__":
    main()
