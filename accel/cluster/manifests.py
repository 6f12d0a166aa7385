"""The indexed Job and the Service of a training on Kubernetes; the Job is elastic under Kueue.

The scheduler patches its `parallelism`. Manifests that need no code stand in examples/kubernetes and examples/cluster.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
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
    if template.queue is not None:
        labels[_QUEUE] = template.queue
    own = {
        "name": name,
        "namespace": template.namespace,
        "labels": {"app.kubernetes.io/managed-by": "accel", **labels},
    }
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
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": template.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # workers of a DataLoader hand over batches in it
        ],
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
        job["metadata"] = {**own, "annotations": _ELASTIC}
        job["spec"]["suspend"] = True  # until Kueue admits it
    return service, job


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
        "resources": {
            "limits": {"memory": template.memory} | ({} if template.slots == "cpu" else {template.slots: "1"}),
            "requests": {"memory": template.memory, "cpu": "1" if template.slots == "cpu" else template.cpus},
        },
        "volumeMounts": [
            {"name": "shared", "mountPath": template.mount},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def object_name(job: str) -> str:
    """Return a name that Kubernetes allows, and no other job has: `accel-JOB`, with a hash where JOB is changed."""
    plain = re.sub(r"[^a-z0-9-]+", "-", job.lower()).strip("-")[:40]
    return f"accel-{plain}" if plain == job else f"accel-{plain}-{hashlib.sha256(job.encode()).hexdigest()[:8]}"


def label(value: str) -> str:
    """Return a value that Kubernetes allows for a label."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", value)[:63].strip("-_.")
