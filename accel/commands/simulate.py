"""`accel cluster simulate`: how long would the jobs of a workload take?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from accel.cluster.jobs import ClusterNode
from accel.cluster.outcome import SimulationOutcome, outcome
from accel.cluster.policy import allocate
from accel.cluster.profiles import Application, read_rows
from accel.cluster.simulator import RESTART_S, JobRules, Outage, Simulation, read_workload
from accel.errors import InvalidArgument
from accel.files import write_atomic
from accel.report.quiet_rich import Console, Table


@click.command()
@click.argument("workloads", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--profiles",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    required=True,
    help="Folder with a folder of measured tables for each application.",
)
@click.option("--nodes", default=16, show_default=True, type=click.IntRange(1), help="Nodes of the cluster.")
@click.option("--gpus", default=4, show_default=True, type=click.IntRange(1), help="GPUs of each node.")
@click.option("--interval", default=60, show_default=True, type=click.IntRange(1), help="Seconds between decisions.")
@click.option(
    "--restart-s",
    default=RESTART_S,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds that a resize costs.",
)
@click.option(
    "--outages",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="CSV file with node, since_s, until_s: when nodes fail or are reclaimed. Nodes are node-00, node-01, …",
)
@click.option("--unknown-length", is_flag=True, help="Jobs don't say how many epochs they train.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for outcomes.json.")
def simulate(
    workloads: Sequence[Path],
    profiles: Path,
    nodes: int,
    gpus: int,
    interval: int,
    restart_s: float,
    outages: Path | None,
    unknown_length: bool,
    out: Path | None,
) -> None:
    """Say how long the jobs of each workload would take.

    A WORKLOAD is a CSV file with the columns name, time (s), application, num_replicas and batch_size.
    """
    applications = {path.name: Application(path) for path in sorted(profiles.iterdir()) if path.is_dir()}
    if not applications:
        raise InvalidArgument(f"{profiles} must hold a folder for each application. Found: none")
    hosts = [ClusterNode(f"node-{number:02}", gpus) for number in range(nodes)]
    lost = [] if outages is None else read_rows(outages, Outage)
    rules = JobRules(restart_s=restart_s, says_length=not unknown_length)
    outcomes = []
    for path in workloads:
        simulation = Simulation(read_workload(path), hosts, allocate, applications, rules, interval, lost)
        simulation.run()
        outcomes.append(outcome(simulation, path.stem))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / "outcomes.json", json.dumps([each.to_dict() for each in outcomes], indent=1) + "\n")
    Console().print(_table(outcomes))


def _table(outcomes: Sequence[SimulationOutcome]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("workload", no_wrap=True)
    for head in ("mean s", "99 % s", "all s", "worst ratio", "GPU h", "resizes", "waited h", "lost h"):
        table.add_column(head, justify="right", no_wrap=head != "worst ratio")
    for each in outcomes:
        lost = (each.stood_s + each.lost_s) / 3600
        figures = f"{each.mean_s:,.0f}", f"{each.p99_s:,.0f}", f"{each.makespan_s:,.0f}", f"{each.worst_fairness:.2f}"
        more = f"{each.gpu_hours:,.0f}", str(each.restarts), f"{each.waited_s / 3600:.1f}", f"{lost:.1f}"
        table.add_row(each.workload, *figures, *more)
    return table
