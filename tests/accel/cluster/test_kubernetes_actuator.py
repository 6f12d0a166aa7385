"""Jobs on Kubernetes: what is asked of the API server, which is played here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import config_from_args, get_args_parser

from accel.cluster import kubernetes_actuator, manifests
from accel.cluster.actuators import ClusterUnreachable
from accel.cluster.job_table import JobRow, JobSpec, JobTable
from accel.cluster.kubernetes_actuator import KubernetesActuator
from accel.cluster.manifests import PodTemplate, elastic_job, label, object_name
from accel.cluster.scheduler import Scheduler
from accel.elastic.batch_size.report import PROFILE
from accel.errors import InvalidArgument
from tests.accel.cluster.cluster_cases import profile
from tests.accel.cluster.played_kubernetes import PlayedKubernetes, served

pytest.importorskip("kubernetes", reason="needs kubernetes (pip install -e '.[dev]')")
TEMPLATE = PodTemplate(image="registry.example.com/train:1", claim="shared", mount="/shared")


def row(folder: str = "/shared/one", **options: Any) -> JobRow:
    spec = JobSpec(
        arguments=("train.py", "--epochs=3"), folder="/shared", checkpoint=folder, **{"max_replicas": 4, **options}
    )
    return JobRow("train-1", spec, 0.0)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedKubernetes:
    monkeypatch.setattr(kubernetes_actuator, "_LOOK_S", 0.001)
    return PlayedKubernetes({"b": 4, "a": 2, "none": 0}, {"a": "NVIDIA-A100"})


@pytest.fixture
def actuator(played: PlayedKubernetes) -> Iterator[KubernetesActuator]:
    with served(played) as api:
        yield KubernetesActuator(TEMPLATE, api)


@pytest.mark.parametrize("queue", [None, "research"])
@pytest.mark.parametrize("kind", ["gpu", "NVIDIA-A100"])
def test_manifests_hold_to_the_published_schemas(queue: str | None, kind: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    template = PodTemplate(image="train:1", claim="shared", mount="/shared", queue=queue)
    service, job = elastic_job(row(), 3, kind, template)
    assert models.IoK8sApiCoreV1Service.from_dict(service).to_dict() == service
    assert models.IoK8sApiBatchV1Job.from_dict(job).to_dict() == job
    pod = job["spec"]["template"]["spec"]
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert pod["terminationGracePeriodSeconds"] > kubernetes_actuator.SAVE_S
    assert pod.get("nodeSelector") == (None if kind == "gpu" else {manifests.KIND: kind})
    elastic = job["metadata"].get("annotations", {}).get("kueue.x-k8s.io/elastic-job")
    assert (elastic, job["spec"].get("suspend")) == (("true", True) if queue else (None, None))


def test_torchrun_takes_the_command_and_meets_at_pod_0() -> None:
    _, job = elastic_job(row(min_replicas=2), 3, "gpu", TEMPLATE)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    program, arguments = container["command"][:3], container["command"][3:]
    assert program == ["python", "-m", "torch.distributed.run"]
    config, _, script = config_from_args(get_args_parser().parse_args(arguments))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 4, 1)
    assert config.rdzv_endpoint == "accel-train-1-0.accel-train-1.default.svc.cluster.local:29400"
    assert script[-2:] == ["train.py", "--epochs=3"]


def test_a_job_is_created_resized_and_deleted(played: PlayedKubernetes, actuator: KubernetesActuator) -> None:
    assert [(node.name, node.gpus, node.kind) for node in actuator.nodes()] == [
        ("a", 2, "NVIDIA-A100"),
        ("b", 4, "gpu"),
    ]
    actuator.change(row(), ("b",))
    actuator.change(row(), ("b", "b", "b"))
    job = played.job("accel-train-1")
    assert (job["spec"]["parallelism"], job["spec"]["completions"]) == (3, 3)
    assert actuator.status("train-1") is None
    assert sum("services" in call and call.startswith("POST") for call in played.calls) == 1
    actuator.change(row(), ())
    assert not played.objects  # its Service is gone with it
    assert actuator.status("train-1") is None
    assert not actuator.recover(row())


def test_a_job_that_moves_to_another_kind_of_gpu_is_made_again(
    played: PlayedKubernetes, actuator: KubernetesActuator
) -> None:
    actuator.change(row(), ("b",))
    actuator.change(row(), ("a", "a"))
    pod = played.job("accel-train-1")["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {manifests.KIND: "NVIDIA-A100"}


@pytest.mark.parametrize(("condition", "ended"), [("Complete", 0), ("SuccessCriteriaMet", 0), ("Failed", 1)])
def test_what_became_of_a_job(
    condition: str, ended: int, played: PlayedKubernetes, actuator: KubernetesActuator
) -> None:
    actuator.change(row(), ("b",))
    played.ends("accel-train-1", condition)
    assert actuator.status("train-1") == ended
    calls = len(played.calls)
    actuator.change(row(), ("b", "b"))  # it has ended meanwhile
    assert all(call.startswith("GET") for call in played.calls[calls:])


def test_a_job_that_somebody_has_deleted_is_lost(played: PlayedKubernetes, actuator: KubernetesActuator) -> None:
    actuator.change(row(), ("b",))
    played.objects.clear()
    assert actuator.status("train-1") == "lost"


@pytest.mark.parametrize(("code", "error"), [(500, ClusterUnreachable), (422, OSError), (403, OSError)])
def test_an_answer_that_may_pass_is_told_from_a_refusal(
    code: int, error: type[Exception], played: PlayedKubernetes, actuator: KubernetesActuator
) -> None:
    played.fails = code
    with pytest.raises(error, match="Kubernetes"):
        actuator.status("train-1")


def test_a_server_that_is_down_does_not_answer(played: PlayedKubernetes) -> None:
    with served(played) as api:
        actuator = KubernetesActuator(TEMPLATE, api)
    with pytest.raises(ClusterUnreachable, match="does not answer"):
        actuator.nodes()


def test_a_scheduler_that_is_started_again_takes_its_jobs_over(
    played: PlayedKubernetes, actuator: KubernetesActuator, tmp_path: Path
) -> None:
    table = JobTable(tmp_path)
    table.submit("train-1", row(str(tmp_path / "one")).spec, 0.0)
    profile(most=4).save(tmp_path / "one" / PROFILE)

    def rounds(scheduler: Scheduler) -> JobRow:
        for _ in range(3):
            scheduler.decide(scheduler.look())
            for future, _ in list(scheduler._changing.values()):
                assert future.exception() is None
        scheduler.look()
        return table.job("train-1")

    first = Scheduler(table, actuator)
    assert len(rounds(first).nodes) == 4
    again = Scheduler(table, KubernetesActuator(TEMPLATE, actuator._batch.api_client))
    again.recover()
    posted = [call for call in played.calls if call.startswith(("POST", "DELETE"))]
    assert table.job("train-1").state == "running"
    assert len(rounds(again).nodes) == 4
    played.ends("accel-train-1", "Complete")
    assert rounds(again).state == "done"
    assert [call for call in played.calls if call.startswith(("POST", "DELETE"))] == posted


def test_names_are_allowed_and_differ() -> None:
    names = ["train", "Train", "train_1", "train-1", "tränen", "x" * 90, "x" * 91]
    made = {object_name(name) for name in names}
    assert len(made) == len(names)
    assert all(name == name.lower() and len(name) <= 63 - len("-100") and "_" not in name for name in made)
    assert label("NVIDIA A100/80GB") == "NVIDIA-A100-80GB"


def test_the_volume_has_the_same_path_everywhere() -> None:
    with pytest.raises(InvalidArgument, match=r"absolute path. Found: 'shared'"):
        PodTemplate(image="train:1", claim="shared", mount="shared")
