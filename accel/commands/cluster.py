"""`accel cluster`: many elastic jobs on one cluster."""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from accel.cluster.actuators import LOG, LocalActuator
from accel.cluster.baselines import Optimus, Tiresias, equal_shares, first_come, optimus_seconds
from accel.cluster.genetic import Pollux
from accel.cluster.job_table import FILE, JobSpec, JobTable, claimed
from accel.cluster.jobs import ClusterNode
from accel.cluster.outcome import SimulationOutcome, draw, outcome
from accel.cluster.policy import allocate
from accel.cluster.profiles import Application
from accel.cluster.scheduler import INTERVAL_S, Scheduler
from accel.cluster.simulator import RESTART_S, JobRules, Policy, Simulation, read_outages, read_workload
from accel.errors import InvalidArgument
from accel.files import write_atomic

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


@click.group()
def cluster() -> None:
    """Run many elastic jobs on one cluster, or simulate it."""


FOLDER = click.option(
    "--cluster",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".accel-cluster"),
    show_default=True,
    envvar="ACCEL_CLUSTER",
    help="Folder of the cluster, with its table of jobs.",
)


@cluster.command()
@FOLDER
@click.option("--slots", type=click.IntRange(1), help="Replicas that may run at once.  [default: GPUs, else cores]")
@click.option(
    "--interval", default=INTERVAL_S, show_default=True, type=click.FloatRange(1), help="Seconds between decisions."
)
@click.option("--until-empty", is_flag=True, help="End when no job is left.")
def up(folder: Path, slots: int | None, interval: float, until_empty: bool) -> None:
    """Run the jobs of a cluster on this machine, until it is interrupted; then each job is saved and stopped."""
    table = JobTable(folder)
    with claimed(folder):
        scheduler = Scheduler(table, LocalActuator(slots or _slots()), interval)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: scheduler.stop())
        scheduler.run(until_empty)


def _slots() -> int:
    import torch

    from accel.profiler.host import usable_cores

    return torch.cuda.device_count() or usable_cores()


@cluster.command()
@FOLDER
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(folder: Path, as_json: bool) -> None:
    """Show the jobs of a cluster: state, replicas, and where their time went."""
    rows = _opened(folder).jobs()
    if as_json:
        click.echo(json.dumps([{**vars(row), "spec": vars(row.spec)} for row in rows], indent=1))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("job")
    table.add_column("state")
    for head in ("replicas", "trained h", "waited h", "changing s", "changes"):
        table.add_column(head, justify="right")
    table.add_column("note")
    for row in rows:
        hours = f"{row.service_s / 3600:.2f}", f"{row.waited_s / 3600:.2f}"
        note = row.note or (f"exit status {row.exit_status}" if row.exit_status else "")
        more = str(len(row.nodes)), *hours, f"{row.changing_s:.1f}", str(row.changes), note
        table.add_row(row.name, row.state, *more)
    Console().print(table)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@FOLDER
@click.option("--name", help="Name of the job.  [default: that of the script, and a number]")
@click.option("--min", "least", default=1, show_default=True, type=click.IntRange(1), help="Fewest replicas.")
@click.option("--max", "most", default=1, show_default=True, type=click.IntRange(1), help="Most replicas.")
@click.option(
    "--checkpoint", type=click.Path(path_type=Path, file_okay=False), help="What the script passes as checkpoint=."
)
@click.option("--weight", default=1.0, show_default=True, help="How much its speed counts beside the others'.")
@click.option("--deadline-h", type=click.FloatRange(0, min_open=True), help="Hours from now at which it is wanted.")
@click.option("--fixed", is_flag=True, help="Once it runs, leave its replicas as they are.")
@click.argument("script", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def submit(
    folder: Path,
    name: str | None,
    least: int,
    most: int,
    checkpoint: Path | None,
    weight: float,
    deadline_h: float | None,
    fixed: bool,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Submit a training script as a job of a cluster.

    The script's ARGUMENTS follow it. It passes the environment variable ACCEL_CHECKPOINT, or the folder given here, to
    accel.optimize as checkpoint=.
    """
    if least > most:
        raise InvalidArgument(f"--min must be at most --max. Found: {least} and {most}")
    table = JobTable(folder)
    taken = {row.name for row in table.jobs()}
    numbers = (f"{script.stem}-{number}" for number in itertools.count(1))
    chosen = name or next(each for each in numbers if each not in taken)
    spec = JobSpec(
        arguments=(str(script.resolve()), *arguments),
        folder=str(Path.cwd()),
        checkpoint=str((checkpoint or folder / "jobs" / chosen).resolve()),
        min_replicas=least,
        max_replicas=most,
        weight=weight,
        deadline_s=None if deadline_h is None else deadline_h * 3600,
        is_preemptible=not fixed,
    )
    table.submit(chosen, spec, time.time())
    click.echo(chosen)


@click.command()
@FOLDER
@click.argument("names", nargs=-1, required=True)
def cancel(folder: Path, names: tuple[str, ...]) -> None:
    """End jobs of a cluster, each after a checkpoint."""
    _opened(folder).cancel(names)


@click.command()
@FOLDER
@click.argument("name")
def logs(folder: Path, name: str) -> None:
    """Print what a job of a cluster has printed so far."""
    path = Path(_opened(folder).job(name).spec.checkpoint) / LOG
    if path.exists():
        click.echo(path.read_text(encoding="utf-8", errors="replace"), nl=False)


def _opened(folder: Path) -> JobTable:
    if not (folder / FILE).exists():
        raise InvalidArgument(
            f"{folder} must hold a cluster's jobs. Found: no {FILE}; submit a job first, or name --cluster"
        )
    return JobTable(folder)


@cluster.command()
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
