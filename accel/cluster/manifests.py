"""Manifests of Kubernetes from one description of the pods and one of the job.

| form | what it is | size |
|---|---|---|
| `job` | an indexed Job and its Service; elastic under Kueue | `parallelism`, which the scheduler patches |
| `trainjob` | a TrainJob of Kubeflow Trainer | fixed |
| `raycluster`, `rayjob` | a Ray cluster, with a scheduler or without | Ray's autoscaler |

Under Kueue a Ray cluster that has an autoscaler must be an elastic workload, or it is refused: so these have the
annotation and the autoscaler together, or neither.
"""

from __future__ import annotations

import hashlib
import math
import re
import shlex
from dataclasses import dataclass, replace
from typing import Any

from accel.cluster.actuators import RESTARTS, SAVE_S
from accel.cluster.job_table import JobRow
from accel.elastic.saving.torchrun_nodes import VARIABLE
from accel.errors import InvalidArgument
from accel.scores import CHECKPOINT

GPU = "nvidia.com/gpu"
KIND = "nvidia.com/gpu.product"
"""Label of a node: the kind of its GPUs."""
_QUEUE = "kueue.x-k8s.io/queue-name"
_ELASTIC = {"kueue.x-k8s.io/elastic-job": "true"}
_RAY = "2.60.0"
"""Of the image, or newer."""
_LOST_PODS = 20
_PORT = 29400
GRACE_S = 2 * SAVE_S
"""Between SIGTERM and SIGKILL: the step under way and a checkpoint, and torchrun's own end."""
_JOIN_S = 1800
"""How long torchrun waits for its fewest pods, s; they may have to wait for nodes."""
_KEPT_S = 24 * 3600
"""How long a Job that has ended is there for a scheduler to see."""


@dataclass(frozen=True, kw_only=True)
class PodTemplate:
    """What the pods of all jobs have in common.

    Args:
        image: with Python, torch and accel.
        claim: of a volume that all pods and the scheduler share (`ReadWriteMany`), with scripts and checkpoints.
        mount: path of that volume, the same in the pods and where the scheduler runs.
        namespace: of all objects.
        slots: resource that a replica takes one of.
        cpus: processors for each replica, as Kubernetes writes them.
        memory: for each replica.
        queue: Kueue's LocalQueue; None without Kueue.
        domain: of the cluster's names.

    Raises:
        InvalidArgument: if `mount` is not absolute.
    """

    image: str
    claim: str
    mount: str
    namespace: str = "default"
    slots: str = GPU
    cpus: str = "4"
    memory: str = "16Gi"
    queue: str | None = None
    domain: str = "cluster.local"

    def __post_init__(self) -> None:
        if not self.mount.startswith("/"):
            raise InvalidArgument(f"mount must be an absolute path. Found: {self.mount!r}")


def elastic_job(row: JobRow, replicas: int, kind: str, template: PodTemplate) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the Service and the indexed Job of a training.

    Args:
        row: of the job table.
        replicas: pods.
        kind: of the GPUs they run on; "gpu" for any.
        template: what the pods of all jobs have in common.
    """
    name = object_name(row.name)
    labels = {"accel/job": name, "accel/kind": label(kind)}
    own = _metadata(name, template, labels)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": own,
        "spec": {"clusterIP": "None", "selector": {"accel/job": name}, "publishNotReadyAddresses": True},
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",  # podFailurePolicy asks for it
        "terminationGracePeriodSeconds": math.ceil(GRACE_S),
        "subdomain": name,
        "containers": [_container(row, name, template)],
        "volumes": _volumes(template),
    }
    if kind != "gpu":
        pod["nodeSelector"] = {KIND: kind}
    job: dict[str, Any] = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": own,
        "spec": {
            "completionMode": "Indexed",
            "parallelism": replicas,
            "completions": replicas,
            "backoffLimit": _LOST_PODS,
            "podFailurePolicy": {
                "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
            },
            "podReplacementPolicy": "Failed",
            "ttlSecondsAfterFinished": _KEPT_S,
            "successPolicy": {"rules": [{"succeededCount": 1}]},
            "template": {"metadata": {"labels": own["labels"]}, "spec": pod},
        },
    }
    if template.queue is not None:
        job["metadata"] = _metadata(name, template, {**labels, _QUEUE: template.queue}) | {"annotations": _ELASTIC}
        job["spec"]["suspend"] = True  # until Kueue admits it
    return service, job


def train_job(row: JobRow, replicas: int, template: PodTemplate) -> dict[str, Any]:
    """Return the TrainJob of a training, which keeps its size.

    Args:
        row: of the job table.
        replicas: nodes of one slot each.
        template: what the pods of all jobs have in common.
    """
    name = object_name(row.name)
    queued = {} if template.queue is None else {_QUEUE: template.queue}
    mounts = {"name": "node", "volumeMounts": _mounts(template)}
    pod = {
        "terminationGracePeriodSeconds": math.ceil(GRACE_S),
        "containers": [mounts],
        "volumes": _volumes(template),
    }
    node = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(name, template, {"accel/job": name, **queued}),
        "spec": {
            **({} if template.queue is None else {"suspend": True}),
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": "torch-distributed",
            },
            "trainer": {
                "image": template.image,
                # In a shell, since a trainer has no working directory; torchrun reads PET_* for the rest.
                "command": ["sh", "-c", f"cd {shlex.quote(row.spec.folder)} && {shlex.join(_trainjob_command(row))}"],
                "env": [
                    {"name": CHECKPOINT, "value": row.spec.checkpoint},
                    {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": f"{SAVE_S:.0f}"},
                ],
                "numNodes": replicas,
                "resourcesPerNode": _resources(template),
            },
            "runtimePatches": [
                {
                    "manager": "accel/cluster",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
                }
            ],
        },
    }


def _trainjob_command(row: JobRow) -> list[str]:
    # torchrun becomes process 1, so that it gets the SIGTERM.
    return ["exec", "python", "-m", "torch.distributed.run", f"--max-restarts={RESTARTS}", *row.spec.arguments]


def ray_cluster(name: str, least: int, most: int, template: PodTemplate) -> dict[str, Any]:
    """Return a Ray cluster whose workers have one slot each, for `accel cluster up --ray`.

    Args:
        name: of the cluster.
        least: fewest workers, ≥ 0.
        most: most of them; above `least` Ray's autoscaler decides how many there are.
        template: what the pods have in common.
    """
    elastic = most > least
    queued = {} if template.queue is None else {_QUEUE: template.queue}
    spec: dict[str, Any] = {
        "rayVersion": _RAY,
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0"},  # no rank runs beside the head
            "template": {"spec": _ray_pod("ray-head", template, slots="cpu")},
        },
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                "replicas": least,
                "minReplicas": least,
                "maxReplicas": most,
                "rayStartParams": {},
                "template": {"spec": _ray_pod("ray-worker", template, slots=template.slots)},
            }
        ],
    }
    if elastic:
        spec |= {"enableInTreeAutoscaling": True, "autoscalerOptions": {"version": "v2"}}
    metadata = _metadata(object_name(name), template, queued)
    if template.queue is not None:
        spec["suspend"] = True  # until Kueue admits it
        metadata |= {"annotations": _ELASTIC} if elastic else {}
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": spec}


def ray_job(name: str, folder: str, least: int, most: int, template: PodTemplate) -> dict[str, Any]:
    """Return a RayJob: a Ray cluster that lives for as long as a cluster's table has jobs.

    Args:
        name: of the RayJob.
        folder: of the cluster, on the shared volume; jobs are submitted to its table.
        least: fewest workers.
        most: most of them.
        template: what the pods have in common.
    """
    cluster = ray_cluster(name, least, most, template)
    suspend = {"suspend": cluster["spec"].pop("suspend")} if template.queue is not None else {}
    up = ["python", "-m", "accel", "cluster", "up", "--ray", "auto", "--cluster", folder, "--until-empty"]
    if template.slots != "cpu":
        up += ["--resource", "GPU"]
    spec = {
        "entrypoint": shlex.join(up),
        "shutdownAfterJobFinishes": True,
        **suspend,
        "rayClusterSpec": cluster["spec"],
    }
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": cluster["metadata"], "spec": spec}


def _metadata(name: str, template: PodTemplate, labels: dict[str, str]) -> dict[str, Any]:
    own = {"app.kubernetes.io/managed-by": "accel", **labels}
    return {"name": name, "namespace": template.namespace, "labels": own}


def _volumes(template: PodTemplate) -> list[dict[str, Any]]:
    return [
        {"name": "shared", "persistentVolumeClaim": {"claimName": template.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # workers of a DataLoader hand over batches in it
    ]


def _mounts(template: PodTemplate) -> list[dict[str, Any]]:
    return [{"name": "shared", "mountPath": template.mount}, {"name": "shm", "mountPath": "/dev/shm"}]


def _resources(template: PodTemplate) -> dict[str, dict[str, str]]:
    """Return what one replica takes."""
    return {
        "limits": {"memory": template.memory} | ({} if template.slots == "cpu" else {template.slots: "1"}),
        "requests": {"memory": template.memory, "cpu": "1" if template.slots == "cpu" else template.cpus},
    }


def _ray_pod(container: str, template: PodTemplate, slots: str) -> dict[str, Any]:
    return {
        "terminationGracePeriodSeconds": math.ceil(GRACE_S),
        "containers": [
            {
                "name": container,
                "image": template.image,
                "resources": _resources(replace(template, slots=slots)),
                "volumeMounts": _mounts(template),
            }
        ],
        "volumes": _volumes(template),
    }


def _container(row: JobRow, name: str, template: PodTemplate) -> dict[str, Any]:
    """Return the container of a pod: torchrun is its process 1, so that it gets the SIGTERM."""
    spec = row.spec
    # The full name: pod 0 finds it in its own /etc/hosts, and so knows that it holds the rendezvous.
    meeting = f"{name}-0.{name}.{template.namespace}.svc.{template.domain}:{_PORT}"
    torchrun = [
        *("python", "-m", "torch.distributed.run"),
        f"--nnodes={spec.min_replicas}:{spec.max_replicas}",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={meeting}",
        f"--rdzv-id={name}",
        f"--rdzv-conf=join_timeout={_JOIN_S},last_call_timeout=5",
        "--local-addr=$(POD_IP)",  # a new pod's name may not be known to all yet
        f"--max-restarts={RESTARTS}",
    ]
    field = {"fieldRef": {"fieldPath": "status.podIP"}}
    return {
        "name": "replica",
        "image": template.image,
        "command": [*torchrun, *spec.arguments],
        "workingDir": spec.folder,
        "env": [
            {"name": "POD_IP", "valueFrom": field},
            {"name": CHECKPOINT, "value": spec.checkpoint},
            {"name": VARIABLE, "value": "1"},  # or no pod can join later
            {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": f"{SAVE_S:.0f}"},
        ],
        "resources": _resources(template),
        "volumeMounts": _mounts(template),
    }


def object_name(job: str) -> str:
    """Return a name that Kubernetes allows, and no other job has: `accel-JOB`, with a hash where JOB is changed."""
    plain = re.sub(r"[^a-z0-9-]+", "-", job.lower()).strip("-")[:40]
    return f"accel-{plain}" if plain == job else f"accel-{plain}-{hashlib.sha256(job.encode()).hexdigest()[:8]}"


def label(value: str) -> str:
    """Return a value that Kubernetes allows for a label."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", value)[:63].strip("-_.")
