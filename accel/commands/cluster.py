"""`accel cluster`: many elastic jobs on one cluster."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import click

from accel.cluster.actuators import Actuator
from accel.cluster.job_table import FILE, JobTable, claimed, scheduler_of
from accel.cluster.local_actuator import on_this_machine
from accel.cluster.metrics import serve
from accel.cluster.scheduler import INTERVAL_S, Scheduler
from accel.cluster.status import table, to_html, to_json
from accel.commands.manifest import manifest
from accel.commands.simulate import simulate
from accel.errors import InvalidArgument
from accel.files import write_atomic
from accel.report.quiet_rich import Console


@click.group()
def cluster() -> None:
    """Run many elastic jobs on one cluster, or simulate it."""


cluster.add_command(simulate)
cluster.add_command(manifest)


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
@click.option(
    "--interval", default=INTERVAL_S, show_default=True, type=click.FloatRange(1), help="Seconds between decisions."
)
@click.option("--until-empty", is_flag=True, help="End when no job is left.")
@click.option("--metrics-port", type=click.IntRange(1, 65535), help="Serve Prometheus metrics on this port.")
@click.option("--slots", type=click.IntRange(1), help="On this machine: replicas at once.  [default: GPUs, else cores]")
@click.option("--ray", "address", help="Run on the Ray cluster at this address; `auto` for that of this machine.")
@click.option("--image", help="Run on Kubernetes, in this image with Python, torch and accel.")
@click.option("--claim", help="Kubernetes: claim of the volume with scripts, checkpoints and the table.")
@click.option("--mount", help="Kubernetes: path of that volume, the same in pods and here.")
@click.option("--namespace", default="default", show_default=True, help="Kubernetes: of all objects.")
@click.option("--queue", help="Kubernetes: Kueue's LocalQueue.")
@click.option("--resource", help="Ray, Kubernetes: what a replica takes one of.  [default: GPUs]")
def up(
    folder: Path, interval: float, until_empty: bool, metrics_port: int | None, slots: int | None, **where: str | None
) -> None:
    """Run the jobs of a cluster until it is interrupted; then each job is saved and stopped."""
    jobs = JobTable(folder)
    with claimed(folder):
        scheduler = Scheduler(jobs, _actuator(slots, **where), interval, say=click.echo)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: scheduler.stop())
        if metrics_port is not None:
            serve(jobs, metrics_port)
        scheduler.run(until_empty)


def _actuator(
    slots: int | None,
    address: str | None,
    image: str | None,
    claim: str | None,
    mount: str | None,
    namespace: str | None,
    queue: str | None,
    resource: str | None,
) -> Actuator:
    """Return what jobs are run by."""
    if image is not None:
        from accel.cluster.kubernetes_actuator import KubernetesActuator
        from accel.cluster.manifests import GPU, PodTemplate

        if claim is None or mount is None or address is not None:
            raise InvalidArgument("--image must come with --claim and --mount, and without --ray")
        where = {"image": image, "claim": claim, "mount": mount, "namespace": namespace or "default"}
        return KubernetesActuator(PodTemplate(**where, queue=queue, slots=resource or GPU))
    if address is not None:
        from accel.cluster.ray_actuator import RayActuator

        return RayActuator(address, resource)
    return on_this_machine(slots)


@cluster.command()
@FOLDER
def down(folder: Path) -> None:
    """End the scheduler of a cluster from another terminal: each job is saved and stopped, and can go on later."""
    opened_table(folder)
    process = scheduler_of(folder)
    if process is None:
        raise InvalidArgument(f"{folder} must have a scheduler that runs. Found: none")
    os.kill(process, signal.SIGTERM)
    while scheduler_of(folder) == process:
        time.sleep(0.1)


@cluster.command()
@FOLDER
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a page that needs nothing else.")
def status(folder: Path, as_json: bool, html: Path | None) -> None:
    """Show the jobs of a cluster: state, replicas, speed, and where their time went."""
    rows = opened_table(folder).jobs()
    if html is not None:
        try:
            write_atomic(html, to_html(rows, time.strftime("%Y-%m-%d %H:%M:%S")))
        except OSError as error:
            raise InvalidArgument(f"--html must be a file that can be written. Found: {html}: {error}") from None
    if as_json:
        click.echo(to_json(rows))
    elif html is None:
        Console().print(table(rows))


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
