"""`accel cluster`: many elastic jobs on one cluster."""

from __future__ import annotations

import itertools
import json
import signal
import time
from pathlib import Path

import click
import torch

from accel.cluster.actuators import LOG, LocalActuator
from accel.cluster.job_table import FILE, JobSpec, JobTable, claimed
from accel.cluster.scheduler import INTERVAL_S, Scheduler
from accel.commands.simulate import simulate
from accel.errors import InvalidArgument
from accel.profiler.host import usable_cores
from accel.report.quiet_rich import Console, Table


@click.group()
def cluster() -> None:
    """Run many elastic jobs on one cluster, or simulate it."""


cluster.add_command(simulate)


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
@click.option("--slots", type=click.IntRange(1), help="Replicas that may run at once.  [default: cores; 1 with GPUs]")
@click.option(
    "--interval", default=INTERVAL_S, show_default=True, type=click.FloatRange(1), help="Seconds between decisions."
)
@click.option("--until-empty", is_flag=True, help="End when no job is left.")
def up(folder: Path, slots: int | None, interval: float, until_empty: bool) -> None:
    """Run the jobs of a cluster on this machine, until it is interrupted; then each job is saved and stopped."""
    table, most = JobTable(folder), slots or _slots()
    if most > 1 and torch.cuda.is_available():
        raise InvalidArgument(
            f"--slots must be 1 on a machine with GPUs so far: all jobs would use GPU 0. Found: {most}"
        )
    with claimed(folder):
        scheduler = Scheduler(table, LocalActuator(most), interval, say=click.echo)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: scheduler.stop())
        scheduler.run(until_empty)


def _slots() -> int:
    return 1 if torch.cuda.is_available() else usable_cores()


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
    accel.optimize as checkpoint=, and max_batch_size= too: without that it measures nothing of itself, and gets --min.
    """
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
