"""`accel cluster manifest`: what to give to `kubectl apply`."""

from __future__ import annotations

import json
from pathlib import PurePosixPath

import click

from accel.cluster.job_table import JobRow, JobSpec
from accel.cluster.manifests import GPU, PodTemplate, elastic_job, ray_cluster, ray_job, train_job
from accel.errors import InvalidArgument

_OF_A_SCRIPT = ("job", "trainjob")


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
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
