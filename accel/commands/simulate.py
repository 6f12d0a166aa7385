"""`accel cluster simulate`: how long would the jobs of a workload take?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from accel.cluster.baselines import Optimus, Tiresias, equal_shares, first_come, optimus_seconds
from accel.cluster.genetic import Pollux
from accel.cluster.jobs import ClusterNode, Policy
from accel.cluster.outcome import SimulationOutcome, draw, outcome
from accel.cluster.policy import allocate
from accel.cluster.profiles import Application
from accel.cluster.simulator import RESTART_S, JobRules, Simulation, read_outages, read_workload
from accel.errors import InvalidArgument
from accel.files import write_atomic
from accel.report.quiet_rich import Console, Table

FIXED = JobRules(is_elastic=False, has_fixed_size=True)
RULES = {
    "accel": JobRules(),
    "pollux": JobRules(),
    "equal": JobRules(),
    "tiresias": FIXED,
    "first-come": FIXED,
    "optimus": JobRules(is_elastic=False),
}
"""Policy → what kind of jobs it is for."""


@click.command()
@click.argument("workloads", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--profiles",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    required=True,
    help="Folder with a folder of measured tables for each application.",
)
@click.option(
    "--policy", "policies", multiple=True, type=click.Choice(list(RULES)), default=["accel"], show_default=True
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
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for the JSON and a plot of each.")
def simulate(
    workloads: Sequence[Path],
    profiles: Path,
    policies: Sequence[str],
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
    lost = [] if outages is None else read_outages(outages)
    outcomes = []
    for policy in policies:
        rules = RULES[policy]._replace(restart_s=restart_s, says_length=not unknown_length)
        for path in workloads:
            simulation = Simulation(
                read_workload(path), hosts, allocate, applications, rules, interval_s=interval, outages=lost
            )
            simulation.policy = _policy(policy, simulation)
            simulation.run()
            outcomes.append(outcome(simulation, policy, path.stem))
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
                draw(simulation, out / f"{path.stem}-{policy}.png", f"{path.stem}, {policy}")
    if out is not None:
        write_atomic(out / "outcomes.json", json.dumps([each.to_dict() for each in outcomes], indent=1) + "\n")
    Console().print(_table(outcomes))


def _policy(name: str, simulation: Simulation) -> Policy:
    if name == "tiresias":
        return Tiresias()
    if name == "pollux":
        return Pollux()
    if name == "optimus":
        return Optimus(optimus_seconds({job.submission.name: job for job in simulation.jobs}))
    return {"accel": allocate, "equal": equal_shares, "first-come": first_come}[name]


def _table(outcomes: Sequence[SimulationOutcome]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("policy", no_wrap=True)
    table.add_column("workload", no_wrap=True)
    for head in ("mean s", "99 % s", "all s", "worst ratio", "GPU h", "resizes", "waited h", "lost h"):
        table.add_column(head, justify="right", no_wrap=head != "worst ratio")
    for each in outcomes:
        lost = (each.stood_s + each.lost_s) / 3600
        figures = f"{each.mean_s:,.0f}", f"{each.p99_s:,.0f}", f"{each.makespan_s:,.0f}", f"{each.worst_fairness:.2f}"
        more = f"{each.gpu_hours:,.0f}", str(each.restarts), f"{each.waited_s / 3600:.1f}", f"{lost:.1f}"
        table.add_row(each.policy, each.workload, *figures, *more)
    return table
