"""Jobs as indexed Jobs of Kubernetes, a pod for each replica: Kubernetes places them, and makes lost ones again.

    change ─▶ a headless Service and an indexed Job, whose pods run `torchrun --nnodes=MIN:MAX` and meet at pod 0
           ─▶ later: `parallelism` and `completions` are patched; torchrun has the ranks save, and meets anew
           ─▶ for none: the Job is deleted, and its pods save on SIGTERM

A scheduler that is started again takes over the Jobs that it finds. The policy's nodes decide how many pods a job has
and on which kind of GPU; on which node each runs is for Kubernetes to say. Under Kueue (`queue`) the Jobs are elastic
workloads, https://kueue.sigs.k8s.io/docs/concepts/elastic_workload/, which needs Kueue 0.18.6 or 0.19.2.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accel.cluster.actuators import SAVE_S, ClusterUnreachable, Status
from accel.cluster.job_table import JobRow
from accel.cluster.jobs import ClusterNode
from accel.cluster.manifests import GRACE_S, KIND, PodTemplate, elastic_job, label, object_name
from accel.errors import InvalidArgument

_LOOK_S = 1.0
_SPOT = {
    "cloud.google.com/gke-spot": "true",
    "eks.amazonaws.com/capacityType": "SPOT",
    "karpenter.sh/capacity-type": "spot",
    "kubernetes.azure.com/scalesetpriority": "spot",
}


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
            service, body = elastic_job(row, len(nodes), kind, self._template)
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
        deadline = time.monotonic() + GRACE_S + SAVE_S
        while self._job(name) is not None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if self._job(name) is not None:
            raise ClusterUnreachable(f"Kubernetes has not deleted the Job {name} in {GRACE_S + SAVE_S:.0f} s")

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
