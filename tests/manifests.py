"""The manifests of examples/kubernetes, and what must agree within one of them beyond what a schema says."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "kubernetes"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))
JOBS = [path for path in MANIFESTS if path.stem != "checkpoints"]
JOBSETS = [path for path in JOBS if path.stem.startswith("jobset")]

CLUSTER_DOMAIN = "svc.cluster.local"
VARIABLE = re.compile(r"\$\(([A-Z_]+)\)")

Manifest = dict[str, Any]


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, as the API server does; PyYAML would take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise ValueError(f"A key must stand once in a mapping. Found {twice} again{node.start_mark}")
        return super().construct_mapping(node, deep)


def load(path: Path) -> Manifest:
    manifest: Manifest = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    return manifest


def jobs(manifest: Manifest) -> dict[str, Manifest]:
    """Return the replicated jobs of a JobSet by their names."""
    return {job["name"]: job["template"]["spec"] for job in manifest["spec"]["replicatedJobs"]}


def workers(manifest: Manifest) -> Manifest:
    """Return the pod of the workers; of a TrainJob, what it changes of the runtime's."""
    if manifest["kind"] == "TrainJob":
        patch = manifest["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
        pod: Manifest = patch["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        return pod
    return jobs(manifest)["workers"]["template"]["spec"]


def command(manifest: Manifest) -> list[str]:
    if manifest["kind"] == "TrainJob":
        words: list[str] = manifest["spec"]["trainer"]["command"]
        return words
    return workers(manifest)["containers"][0]["command"]


def environment(manifest: Manifest) -> dict[str, str]:
    """Return the variables of the workers; those that the pod's own facts fill are ''."""
    return {entry["name"]: entry.get("value", "") for entry in workers(manifest)["containers"][0].get("env", [])}


def torchrun_arguments(manifest: Manifest) -> argparse.Namespace:
    """Return what torchrun makes of the command; SystemExit where it refuses one."""
    return get_args_parser().parse_args(command(manifest)[1:])


def torchrun_config(manifest: Manifest) -> LaunchConfig:
    return config_from_args(torchrun_arguments(manifest))[0]


def faults(manifest: Manifest) -> list[str]:
    """Return one sentence for each thing in a job that does not agree with another."""
    check = _jobset_faults if manifest["kind"] == "JobSet" else _trainjob_faults
    return [*_pod_faults(manifest), *check(manifest)]


def _pod_faults(manifest: Manifest) -> Iterator[str]:
    pod, arguments = workers(manifest), torchrun_arguments(manifest)
    container = pod["containers"][0]
    if not (arguments.shutdown_timeout or 30) < pod["terminationGracePeriodSeconds"]:
        yield "the kubelet kills torchrun before torchrun's own limit for a checkpoint"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    if mounts.keys() - {volume["name"] for volume in pod["volumes"]}:
        yield "a mount has no volume"
    claim = load(FOLDER / "checkpoints.yaml")["metadata"]["name"]
    places = [path for name, path in mounts.items() if claims.get(name) == claim]
    if arguments.training_script_args != [f"--checkpoints={path}" for path in places]:
        yield "checkpoints are not written to the volume of checkpoints.yaml"


def _trainjob_faults(manifest: Manifest) -> Iterator[str]:
    # Rules of the CRD in CEL, which no schema in a package holds.
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", manifest["metadata"]["name"]):
        yield "the name is no RFC 1035 label"
    if "kueue.x-k8s.io/queue-name" not in manifest["metadata"].get("labels", {}):
        yield "no queue is named"
    if manifest["spec"].get("suspend") is not True:
        yield "it starts without Kueue"


def _jobset_faults(manifest: Manifest) -> Iterator[str]:
    job, pod, config = jobs(manifest)["workers"], workers(manifest), torchrun_config(manifest)
    if not config.max_nodes == job["parallelism"] == job["completions"]:
        yield "the largest number of pods is not that of --nnodes"
    if str(config.nproc_per_node) != pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]:
        yield "there are not as many processes as GPUs"
    for name in VARIABLE.findall(" ".join(command(manifest))):
        if name not in environment(manifest):
            yield f"$({name}) is in the command and not in the environment"
    if environment(manifest).get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        yield "a pod that joins later waits for a store that nobody names"
    if "podFailurePolicy" in job and pod["restartPolicy"] != "Never":
        yield "podFailurePolicy needs restartPolicy Never"
    if "successPolicy" in job and job["completionMode"] != "Indexed":
        yield "successPolicy needs completionMode Indexed"
    yield from _endpoint_faults(manifest)
    yield from _order_faults(manifest)


def _endpoint_faults(manifest: Manifest) -> Iterator[str]:
    host, _, port = torchrun_arguments(manifest).rdzv_endpoint.rpartition(":")
    subdomain = manifest["spec"]["network"]["subdomain"]
    first_pods = {f"{manifest['metadata']['name']}-{name}-0-0.{subdomain}": job for name, job in jobs(manifest).items()}
    # torch compares the whole name with the pod's own; the short one is enough for those who look it up.
    hosts = "workers" if torchrun_arguments(manifest).rdzv_backend == "c10d" else "etcd"
    ending = f".$(NAMESPACE).{CLUSTER_DOMAIN}" if hosts == "workers" else ""
    job = first_pods.get(host.removesuffix(ending) if host.endswith(ending) else "")
    if job is None or job is not jobs(manifest)[hosts]:
        yield f"the endpoint is not the first pod of {hosts}"
        return
    container = job["template"]["spec"]["containers"][0]
    if [str(entry["containerPort"]) for entry in container["ports"]] != [port]:
        yield "the endpoint has another port than the pod"
    if hosts == "etcd":
        yield from _etcd_faults(container, port)


def _etcd_faults(container: Manifest, port: str) -> Iterator[str]:
    if f"--listen-client-urls=http://0.0.0.0:{port}" not in container["command"]:
        yield "etcd listens at another port"
    if container["readinessProbe"]["tcpSocket"]["port"] != int(port):
        yield "the probe asks another port"
    if "--enable-v2" not in container["command"]:
        yield "torch needs etcd's v2 API"


def _order_faults(manifest: Manifest) -> Iterator[str]:
    targets = manifest["spec"].get("successPolicy", {}).get("targetReplicatedJobs", list(jobs(manifest)))
    if targets != ["workers"]:
        yield "the JobSet does not end with its workers"
    seen: set[str] = set()
    for job in manifest["spec"]["replicatedJobs"]:
        if not {entry["name"] for entry in job.get("dependsOn", [])} <= seen:
            yield f"{job['name']} waits for a job that does not stand before it"
        seen.add(job["name"])
