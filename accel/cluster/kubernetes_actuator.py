"""Jobs as indexed Jobs of Kubernetes, a pod for each replica: Kubernetes places them, and makes lost ones again.

    change ─▶ a headless Service and an indexed Job, whose pods run `torchrun --nnodes=MIN:MAX` and meet at pod 0
           ─▶ later: `parallelism` and `completions` are patched; torchrun has the ranks save, and meets anew
           ─▶ for none: the Job is deleted, and its pods save on SIGTERM

A scheduler that is started again takes over the Jobs that it finds. The policy's nodes decide how many pods a job has
and on which kind of GPU; on which node each runs is for Kubernetes to say. Under Kueue (`queue`) the Jobs are elastic
workloads, https://kueue.sigs.k8s.io/docs/concepts/elastic_workload/, which needs Kueue 0.18.6 or 0.19.2.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from accel.cluster.actuators import RESTARTS, SAVE_S, ClusterUnreachable, Status
from accel.cluster.job_table import JobRow
from accel.cluster.jobs import ClusterNode
from accel.elastic.saving.torchrun_nodes import VARIABLE
from accel.errors import InvalidArgument
from accel.scores import CHECKPOINT

GPU = "nvidia.com/gpu"
KIND = "nvidia.com/gpu.product"
"""Label of a node: the kind of its GPUs."""
_LOST_PODS = 20
_PORT = 29400
_LOOK_S = 1.0
_GRACE_S = 2 * SAVE_S
"""Between SIGTERM and SIGKILL: the step under way and a checkpoint, and torchrun's own end."""
_JOIN_S = 1800
"""How long torchrun waits for its fewest pods, s; they may have to wait for nodes."""
_KEPT_S = 24 * 3600
"""How long a Job that has ended is there for a scheduler to see."""
_SPOT = {
    "cloud.google.com/gke-spot": "true",
    "eks.amazonaws.com/capacityType": "SPOT",
    "karpenter.sh/capacity-type": "spot",
    "kubernetes.azure.com/scalesetpriority": "spot",
}


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


class KubernetesActuator:
    """Run jobs on Kubernetes.

    Args:
        template: what the pods of all jobs have in common.
        api: client of the API server. Default: by the pod's service account, else by ~/.kube/config.

    Raises:
        InvalidArgument: if the client is not installed, or finds no configuration.
    """

    def __init__(self, template: PodTemplate, api: Any = None) -> None:
        try:
            from kubernetes import client
        except ImportError:
            raise InvalidArgument("the client must be installed for Kubernetes: pip install kubernetes") from None
        api = api or _configured()
        self._batch, self._core, self._template = client.BatchV1Api(api), client.CoreV1Api(api), template
        self._stopped: set[str] = set()

    def nodes(self) -> list[ClusterNode]:
        """Return the nodes that are ready and have slots."""
        with _reached():
            nodes = self._core.list_node().items
        return [
            ClusterNode(
                node.metadata.name,
                slots,
                kind=(labels := node.metadata.labels or {}).get(KIND, "gpu"),
                is_spot=any(labels.get(label) == value for label, value in _SPOT.items()),
            )
            for node in sorted(nodes, key=lambda each: str(each.metadata.name))
            if _is_ready(node) and (slots := _amount(node.status.allocatable.get(self._template.slots, "0"))) >= 1
        ]

    def change(self, row: JobRow, nodes: tuple[str, ...]) -> None:
        """Create a job's pods, change their number, or delete them after a checkpoint."""
        name, space = object_name(row.name), self._template.namespace
        kind = {node.name: node.kind for node in self.nodes()}.get(nodes[0], "gpu") if nodes else ""
        with _reached():
            job = self._job(name)
            if job is not None and (_outcome(job) is not None):
                return  # it has ended by itself meanwhile
            if job is not None and (not nodes or (job.metadata.labels or {}).get("accel/kind") != label(kind)):
                self._delete(name)
                job = None
            if not nodes:
                self._stopped.add(row.name)
                return
            self._stopped.discard(row.name)
            service, body = manifests(row, len(nodes), kind, self._template)
            if job is None:
                job = self._batch.create_namespaced_job(space, body)
            else:
                counts = {"parallelism": len(nodes), "completions": len(nodes)}
                self._batch.patch_namespaced_job(name, space, {"spec": counts})
            if _found(self._core.read_namespaced_service, name, space) is None:
                owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job.metadata.uid}
                service["metadata"] = {**service["metadata"], "ownerReferences": [owner]}  # it ends with the Job
                self._core.create_namespaced_service(space, service)

    def _delete(self, name: str) -> None:
        """Delete a Job; return once its pods have ended."""
        space = self._template.namespace
        self._batch.delete_namespaced_job(name, space, propagation_policy="Foreground")
        deadline = time.monotonic() + _GRACE_S + SAVE_S
        while self._job(name) is not None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if self._job(name) is not None:
            raise ClusterUnreachable(f"Kubernetes has not deleted the Job {name} in {_GRACE_S + SAVE_S:.0f} s")

    def _job(self, name: str) -> Any:
        return _found(self._batch.read_namespaced_job, name, self._template.namespace)

    def status(self, name: str) -> Status:
        """Return how a job ended: Kubernetes makes pods again, so that it is lost only if somebody deletes it."""
        if name in self._stopped:
            return None
        with _reached():
            job = self._job(object_name(name))
        return "lost" if job is None else _outcome(job)

    def recover(self, row: JobRow) -> bool:
        """Take over a Job that is there."""
        with _reached():
            return self._job(object_name(row.name)) is not None


def manifests(row: JobRow, replicas: int, kind: str, template: PodTemplate) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the Service and the indexed Job of a training.

    Args:
        row: of the job table.
        replicas: pods.
        kind: of the GPUs they run on; "gpu" for any.
        template: what the pods of all jobs have in common.
    """
    name, space = object_name(row.name), template.namespace
    labels = {"app.kubernetes.io/managed-by": "accel", "accel/job": name, "accel/kind": label(kind)}
    own: dict[str, Any] = {"name": name, "namespace": space, "labels": labels}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": own,
        "spec": {"clusterIP": "None", "selector": {"accel/job": name}, "publishNotReadyAddresses": True},
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",  # podFailurePolicy asks for it
        "terminationGracePeriodSeconds": math.ceil(_GRACE_S),
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
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    if template.queue is not None:
        queued = {"kueue.x-k8s.io/queue-name": template.queue}
        job["metadata"] = {**own, "labels": {**labels, **queued}}
        job["metadata"]["annotations"] = {"kueue.x-k8s.io/elastic-job": "true"}
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
        "volumeMounts": [{"name": "shared", "mountPath": template.mount}, {"name": "shm", "mountPath": "/dev/shm"}],
    }


def object_name(job: str) -> str:
    """Return a name that Kubernetes allows, and no other job has: `accel-JOB`, with a hash where JOB is changed."""
    plain = re.sub(r"[^a-z0-9-]+", "-", job.lower()).strip("-")[:40]
    return f"accel-{plain}" if plain == job else f"accel-{plain}-{hashlib.sha256(job.encode()).hexdigest()[:8]}"


def label(value: str) -> str:
    """Return a value that Kubernetes allows for a label."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", value)[:63].strip("-_.")


def _configured() -> Any:
    """Return a client by the configuration that is there."""
    from kubernetes import client, config

    try:
        config.load_incluster_config()
    except config.ConfigException:
        try:
            config.load_kube_config()
        except config.ConfigException as error:
            raise InvalidArgument(
                f"a Kubernetes configuration must be there (~/.kube/config). Found: {error}"
            ) from None
    return client.ApiClient()


@contextmanager
def _reached() -> Iterator[None]:
    """Turn what the client fails with into one exception.

    Raises:
        ClusterUnreachable: if the API server does not answer, or refuses.
    """
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        if error.status in (400, 403, 422):  # asking again would not help
            raise OSError(f"Kubernetes refuses: {error.reason}: {error.body}") from None
        raise ClusterUnreachable(f"Kubernetes does not answer: {error.status} {error.reason}") from None
    except (HTTPError, OSError) as error:
        raise ClusterUnreachable(f"Kubernetes does not answer: {error}") from None


def _found(read: Any, name: str, space: str) -> Any:
    """Return an object; None if there is none of that name."""
    from kubernetes.client import ApiException

    try:
        return read(name, space)
    except ApiException as error:
        if error.status == 404:
            return None
        raise


def _outcome(job: Any) -> int | None:
    """Return 0 for a Job that is complete, 1 for one that has failed."""
    conditions = {each.type for each in job.status.conditions or () if each.status == "True"}
    return (
        0
        if conditions & {"Complete", "SuccessCriteriaMet"}
        else 1
        if conditions & {"Failed", "FailureTarget"}
        else None
    )


def _is_ready(node: Any) -> bool:
    return not node.spec.unschedulable and any(
        each.type == "Ready" and each.status == "True" for each in node.status.conditions or ()
    )


def _amount(quantity: str) -> int:
    from kubernetes.utils import parse_quantity

    return int(parse_quantity(quantity))
