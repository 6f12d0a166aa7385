"""`accel cluster`: many elastic jobs on one cluster."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from pathlib import Path, PurePosixPath

import click

from accel.cluster.actuators import Actuator
from accel.cluster.job_table import JobRow, JobSpec, JobTable, claimed, scheduler_of
from accel.cluster.manifests import GPU, PodTemplate, elastic_job, ray_cluster, ray_job, train_job
from accel.cluster.policy import PolicyOptions, allocate
from accel.cluster.scheduler import INTERVAL_S, Scheduler
from accel.cluster.status import serve, show, to_json, write_page
from accel.commands.jobs import FOLDER, opened_table
from accel.commands.simulate import simulate
from accel.errors import InvalidArgument

_OF_A_SCRIPT = ("job", "trainjob")


@click.group()
def cluster() -> None:
    """Run many elastic jobs on one cluster, or simulate it."""


cluster.add_command(simulate)


@cluster.command()
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
    address: str | None,
    resource: str | None,
    **pods: str | None,
) -> None:
    """Run the jobs of a cluster until it is interrupted; then each job is saved and stopped."""
    jobs = JobTable(folder)
    policy = functools.partial(allocate, options=PolicyOptions(keeps_links_apart=apart))
    actuator = _actuator(slots, address, resource, pods)
    scheduler = Scheduler(jobs, actuator, interval, policy, say=click.echo)
    # Before the claim, by which `accel cluster down` finds this process.
    own = {number: signal.signal(number, lambda *_: scheduler.stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with claimed(folder):
            if metrics_port is not None:
                serve(jobs, metrics_port)
            scheduler.run(until_empty)
    finally:
        for number, handler in own.items():
            signal.signal(number, handler)


def _actuator(slots: int | None, address: str | None, resource: str | None, pods: dict[str, str | None]) -> Actuator:
    """Return what jobs are run by; only the one that is asked for is imported."""
    if pods["image"] is not None:
        if None in (pods["claim"], pods["mount"]) or address is not None:
            raise InvalidArgument("--image must come with --claim and --mount, and without --ray")
        from accel.cluster.kubernetes_actuator import KubernetesActuator

        return KubernetesActuator(PodTemplate(**pods, slots=resource or GPU))  # type: ignore[arg-type]
    if address is not None:
        from accel.cluster.ray_actuator import RayActuator

        return RayActuator(address, resource)
    from accel.cluster.local_actuator import on_this_machine

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
        write_page(rows, html)
    if as_json:
        click.echo(to_json(rows))
    elif html is None:
        show(rows)


@cluster.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--image", required=True, help="With Python, torch and accel.")
@click.option("--claim", required=True, help="Claim of the volume with scripts and checkpoints.")
@click.option("--mount", required=True, help="Path of that volume in the pods.")
@click.option("--namespace", default="default", show_default=True, help="Of all objects.")
@click.option("--queue", help="Kueue's LocalQueue.")
@click.option("--resource", default=GPU, show_default=True, help="Resource that each replica takes one of.")
@click.option("--name", default="training", show_default=True, help="Of the object.")
@click.option("--min", "least", default=1, show_default=True, type=click.IntRange(0), help="Fewest replicas.")
@click.option("--max", "most", default=1, show_default=True, type=click.IntRange(1), help="Most replicas.")
@click.argument("form", type=click.Choice([*_OF_A_SCRIPT, "raycluster", "rayjob"]))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def manifest(
    image: str,
    claim: str,
    mount: str,
    namespace: str,
    queue: str | None,
    resource: str,
    name: str,
    least: int,
    most: int,
    form: str,
    arguments: tuple[str, ...],
) -> None:
    """Print Kubernetes objects as JSON: of a training that runs alone, or of a Ray cluster for many.

    \b
        accel cluster manifest --image … --claim … --mount /shared --max 4 job train.py --epochs 30 | kubectl apply -f -
        accel cluster manifest --image … --claim … --mount /shared --max 8 rayjob | kubectl apply -f -

    job: an indexed Job, elastic under Kueue (--queue). trainjob: Kubeflow's, of --max nodes. ARGUMENTS are their script
    and what it gets, from the volume's folder on. raycluster: for `accel cluster up --ray`; rayjob: with that in it, on
    the table in MOUNT/.accel-cluster.
    """
    template = PodTemplate(image=image, claim=claim, mount=mount, namespace=namespace, queue=queue, slots=resource)
    if (form in _OF_A_SCRIPT) != bool(arguments):
        raise InvalidArgument(f"a script must be named for job and trainjob alone. Found: {form} {arguments}")
    if least > most:
        raise InvalidArgument(f"--min must be at most --max. Found: {least} and {most}")
    folder = PurePosixPath(mount)
    if form in _OF_A_SCRIPT:
        checkpoint = str(folder / "checkpoints" / name)
        spec = JobSpec(
            arguments=arguments, folder=mount, checkpoint=checkpoint, min_replicas=max(least, 1), max_replicas=most
        )
        row = JobRow(name, spec, 0.0)
        items = elastic_job(row, most, "gpu", template) if form == "job" else [train_job(row, most, template)]
    elif form == "raycluster":
        items = [ray_cluster(name, least, most, template)]
    else:
        items = [ray_job(name, str(folder / ".accel-cluster"), least, most, template)]
    click.echo(json.dumps({"apiVersion": "v1", "kind": "List", "items": list(items)}, indent=1))
