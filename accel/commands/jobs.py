"""`accel submit`, `cancel` and `logs`: the jobs of a cluster."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import click

from accel.cluster.actuators import LOG
from accel.cluster.job_table import FILE, JobSpec, JobTable
from accel.commands.script_job import own_arguments
from accel.errors import InvalidArgument

FOLDER = click.option(
    "--cluster",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".accel-cluster"),
    show_default=True,
    envvar="ACCEL_CLUSTER",
    help="Folder of the cluster, with its table of jobs.",
)


def opened_table(folder: Path) -> JobTable:
    """Return the job table of a cluster that is there.

    Raises:
        InvalidArgument: if there is none.
    """
    if not (folder / FILE).exists():
        raise InvalidArgument(
            f"{folder} must hold a cluster's jobs. Found: no {FILE}; submit a job first, or name --cluster"
        )
    return JobTable(folder)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@FOLDER
@click.option("--name", help="Name of the job.  [default: that of the script, and a number]")
@click.option("--min", "least", default=1, show_default=True, type=click.IntRange(1), help="Fewest replicas.")
@click.option("--max", "most", default=1, show_default=True, type=click.IntRange(1), help="Most replicas.")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, file_okay=False),
    help="What the script passes as accel.Elastic(checkpoint=).",
)
@click.option("--weight", default=1.0, show_default=True, help="How much its speed counts beside the others'.")
@click.option("--deadline-h", type=click.FloatRange(0, min_open=True), help="Hours from now at which it is wanted.")
@click.option("--fixed", is_flag=True, help="Once it runs, leave its replicas as they are.")
@click.option("--in-place", is_flag=True, help="Its processes may go on when their number changes, see LocalJob.")
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
    in_place: bool,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Submit a training script as a job of a cluster.

    The script's ARGUMENTS follow it. It passes the environment variable ACCEL_CHECKPOINT, or the folder given here, to
    accel.Elastic as checkpoint=, and max_batch_size= too: without that it measures nothing of itself, and gets --min.
    """
    jobs = JobTable(folder)
    taken = {row.name for row in jobs.jobs()}
    numbers = (f"{script.stem}-{number}" for number in itertools.count(1))
    chosen = name or next(each for each in numbers if each not in taken)
    spec = JobSpec(
        arguments=(str(script.resolve()), *own_arguments(arguments)),
        folder=str(Path.cwd()),
        checkpoint=str((checkpoint or folder / "jobs" / chosen).resolve()),
        min_replicas=least,
        max_replicas=most,
        weight=weight,
        deadline_s=None if deadline_h is None else deadline_h * 3600,
        is_preemptible=not fixed,
        in_place=in_place,
    )
    jobs.submit(chosen, spec, time.time())
    click.echo(chosen)


@click.command()
@FOLDER
@click.argument("names", nargs=-1, required=True)
def cancel(folder: Path, names: tuple[str, ...]) -> None:
    """End jobs of a cluster, each after a checkpoint."""
    opened_table(folder).cancel(names)


@click.command()
@FOLDER
@click.argument("name")
def logs(folder: Path, name: str) -> None:
    """Print what a job of a cluster has printed so far."""
    path = Path(opened_table(folder).job(name).spec.checkpoint) / LOG
    if path.exists():
        click.echo(path.read_text(encoding="utf-8", errors="replace"), nl=False)
