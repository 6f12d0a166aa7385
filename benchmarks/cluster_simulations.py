"""Completion times of recorded workloads under the cluster's policy and others'.

    python -m benchmarks.cluster_simulations [--data .data/pollux_osdi21] [--restart-s 30 --restart-s 0.1] [--record]

The simulator and the workloads are those of Pollux's authors (benchmarks/goodput/profiles.py says where they come
from): 160 jobs in 8 hours on 16 nodes of 4 GPUs. Beside accel's figures stand those that they published for theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click

from accel.cluster.jobs import ClusterNode
from accel.cluster.outcome import outcome
from accel.cluster.policy import allocate
from accel.cluster.profiles import Application
from accel.cluster.simulator import JobRules, Simulation, read_workload
from benchmarks.goodput.profiles import data_option
from benchmarks.record import Column, Record
from benchmarks.render import Row

RECORD = Record(
    "cluster-simulations",
    "simulated completion times of recorded workloads, by policy",
    {
        "workload": Column("of 160 jobs", "workload"),
        "restart_s": Column("what a change of a job's replicas costs, s", "a resize", "{restart_s:g} s"),
        "accel": Column("mean completion time under accel's policy, s", "accel", "{accel:,.0f} s"),
        "unknown": Column("the same, where jobs don't say how long they are, s", "lengths unknown", "{unknown:,.0f} s"),
        "pollux": Column("published for Pollux, s", "Pollux", "{pollux:,.0f} s"),
        "tiresias": Column("published for Tiresias, s", "Tiresias", "{tiresias:,.0f} s"),
        "optimus": Column("published for Optimus, s", "Optimus", "{optimus:,.0f} s"),
        "p99": Column("99th percentile under accel's policy, s", "99 %", "{p99:,.0f} s"),
        "makespan": Column("until all have ended under accel's policy, s", "all", "{makespan:,.0f} s"),
        "worst_ratio": Column("largest finish-time ratio under accel's policy", "worst ratio", ":.2f"),
        "resizes": Column("under accel's policy", "resizes"),
    },
    head="`python -m benchmarks.cluster_simulations`, {date}. Mean completion times; all but accel's as published.",
    key=("workload", "restart_s"),
)
PUBLISHED = ("pollux", "tiresias", "optimus")


def rows(data: Path, restart_s: float) -> Iterator[Row]:
    """Yield the row of each workload."""
    applications = {path.name: Application(path) for path in (data / "traces").iterdir()}
    nodes = [ClusterNode(f"node-{number:02}", 4) for number in range(16)]
    for path in sorted((data / "workloads").glob("*.csv")):
        means = {}
        for says_length in (False, True):
            rules = JobRules(restart_s=restart_s, says_length=says_length)
            simulation = Simulation(read_workload(path), nodes, allocate, applications, rules)
            simulation.run()
            figures = outcome(simulation, "accel", path.stem)
            means[says_length] = figures.mean_s
        summaries = {
            name: json.loads((data / "results-jobload" / f"{name}-1.0" / "summary.json").read_text())
            for name in PUBLISHED
        }
        yield {
            "workload": path.stem,
            "restart_s": restart_s,
            "accel": means[True],
            "unknown": means[False],
            **{name: each["avgs"][path.stem] for name, each in summaries.items()},
            "p99": figures.p99_s,
            "makespan": figures.makespan_s,
            "worst_ratio": figures.worst_fairness,
            "resizes": figures.restarts,
        }


@click.command()
@data_option
@click.option("--restart-s", "restarts", multiple=True, default=(30.0,), show_default=True, help="Cost of a resize.")
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(data: Path, restarts: tuple[float, ...], record: bool) -> None:
    """Simulate."""
    measured = []
    for restart_s in restarts:
        for row in rows(data, restart_s):
            measured.append(row)
            print(LINE.format_map(row), flush=True)
    if record:
        RECORD.write(measured)


LINE = (
    "{workload}, resize {restart_s:g} s: {accel:,.0f} s (lengths unknown: {unknown:,.0f}); Pollux {pollux:,.0f}, "
    "Tiresias {tiresias:,.0f}, Optimus {optimus:,.0f}; 99 % {p99:,.0f}, all {makespan:,.0f}; ratio {worst_ratio:.2f}"
)

if __name__ == "__main__":
    main()
