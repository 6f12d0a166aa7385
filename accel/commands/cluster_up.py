"""`accel cluster up`: the scheduler of a cluster."""

from __future__ import annotations

import functools
import signal
from pathlib import Path

import click

from accel.cluster.actuators import Actuator
from accel.cluster.job_table import JobTable, claimed
from accel.cluster.local_actuator import on_this_machine
from accel.cluster.metrics import serve
from accel.cluster.policy import PolicyOptions, allocate
from accel.cluster.scheduler import INTERVAL_S, Scheduler
from accel.commands.cluster_folder import FOLDER
from accel.errors import InvalidArgument


@click.command()
@FOLDER
@click.option(
    "--interval", default=INTERVAL_S, show_default=True, type=click.FloatRange(1), help="Seconds between decisions."
)
@click.option("--until-empty", is_flag=True, help="End when no job is left.")
@click.option("--apart", is_flag=True, help="Put no two jobs of several nodes on one node: they'd share its link.")
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
    folder: Path,
    interval: float,
    until_empty: bool,
    apart: bool,
    metrics_port: int | None,
    slots: int | None,
    **where: str | None,
) -> None:
    """Run the jobs of a cluster until it is interrupted; then each job is saved and stopped."""
    jobs = JobTable(folder)
    with claimed(folder):
        policy = functools.partial(allocate, options=PolicyOptions(keeps_links_apart=apart))
        scheduler = Scheduler(jobs, _actuator(slots, **where), interval, policy, say=click.echo)
        if metrics_port is not None:
            serve(jobs, metrics_port)
        own = {number: signal.signal(number, lambda *_: scheduler.stop()) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            scheduler.run(until_empty)
        finally:
            for number, handler in own.items():
                signal.signal(number, handler)


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
