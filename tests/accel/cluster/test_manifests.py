"""Manifests from one description hold to the published schemas, and say what they are to say."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from torch.distributed.run import config_from_args, get_args_parser

from accel.cluster.manifests import KIND, PodTemplate, ray_cluster
from accel.commands.cli import main
from accel.commands.cluster import up

models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
KUBERAY = json.loads((Path(__file__).parent / "kuberay_schema.json").read_text())
"""Of KubeRay 1.7.0, without the types of Kubernetes itself."""
PLACE = ("--image", "registry.example.com/train:1", "--claim", "shared", "--mount", "/shared")
SIMPLE = {"string": str, "boolean": bool, "array": list, "object": dict}


def printed(*arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(main, ["cluster", "manifest", *PLACE, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    objects = json.loads(result.stdout)
    assert (objects["apiVersion"], objects["kind"]) == ("v1", "List")
    return list(objects["items"])


def problems(part: Any, schema: dict[str, Any], at: str = "spec") -> list[str]:
    """Return what a schema has against a part of a manifest; it knows all fields that there may be."""
    if schema.get("podTemplate"):
        same = models.IoK8sApiCoreV1PodTemplateSpec.from_dict(part).to_dict() == part
        return [] if same else [f"{at} is no pod template"]
    if "is" in schema:
        return problems(part, KUBERAY[schema["is"]], at)
    is_number = isinstance(part, int) and not isinstance(part, bool)
    is_typed = is_number if schema["type"] == "integer" else isinstance(part, SIMPLE[schema["type"]])
    found = [] if is_typed else [f"{at} is no {schema['type']}"]
    found += [f"{at} is {part}"] if part not in schema.get("enum", [part]) else []
    if isinstance(part, dict) and is_typed and "properties" in schema:
        found += [f"{at} lacks {name}" for name in schema.get("required", ()) if name not in part]
        for name, value in part.items():
            known = schema["properties"].get(name)
            found += [f"{at} has {name}"] if known is None else problems(value, known, f"{at}.{name}")
    if isinstance(part, dict) and "additionalProperties" in schema:
        found += [
            each for name in part for each in problems(part[name], schema["additionalProperties"], f"{at}.{name}")
        ]
    if isinstance(part, list) and "items" in schema:
        found += [
            each for number, item in enumerate(part) for each in problems(item, schema["items"], f"{at}[{number}]")
        ]
    return found


@pytest.mark.parametrize("queue", [(), ("--queue", "research")])
@pytest.mark.parametrize("resource", [(), ("--resource", "cpu")])
@pytest.mark.parametrize(("least", "most"), [("2", "2"), ("0", "4")])
def test_ray_objects_hold_to_kuberay_s_schema(
    queue: tuple[str, ...], resource: tuple[str, ...], least: str, most: str
) -> None:
    options = ("--min", least, "--max", most, *queue, *resource)
    (cluster,), (job,) = printed(*options, "raycluster"), printed(*options, "rayjob")
    for each in (cluster, job):
        assert each["apiVersion"] == "ray.io/v1"
        assert problems(each["spec"], KUBERAY[each["kind"]]) == []
        labels, annotations = each["metadata"]["labels"], each["metadata"].get("annotations", {})
        spec = each["spec"].get("rayClusterSpec", each["spec"])
        scales = spec.get("enableInTreeAutoscaling", False)
        assert scales is (most != least)
        assert labels.get("kueue.x-k8s.io/queue-name") == ("research" if queue else None)
        # Kueue refuses the autoscaler without the annotation, and a fixed cluster needs neither.
        assert ("kueue.x-k8s.io/elastic-job" in annotations) is (scales and bool(queue))
        assert each["spec"].get("suspend") == (True if queue else None)
        assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert "suspend" not in job["spec"]["rayClusterSpec"]
    words = shlex.split(job["spec"]["entrypoint"])
    parsed = up.make_context("up", words[words.index("up") + 1 :])
    assert (parsed.params["address"], str(parsed.params["folder"])) == ("auto", "/shared/.accel-cluster")


def test_the_schema_refuses_what_it_does_not_know() -> None:
    spec = ray_cluster("a", 1, 4, PodTemplate(image="i", claim="c", mount="/m"))["spec"]
    assert problems({**spec, "enableInTreeAutoscalin": True}, KUBERAY["RayCluster"]) == [
        "spec has enableInTreeAutoscalin"
    ]
    assert problems({**spec, "rayVersion": 2.6}, KUBERAY["RayCluster"]) == ["spec.rayVersion is no string"]
    assert problems({**spec, "autoscalerOptions": {"version": "v3"}}, KUBERAY["RayCluster"]) == [
        "spec.autoscalerOptions.version is v3"
    ]
    pod = spec["headGroupSpec"]["template"]["spec"]
    pod["containers"][0]["images"] = pod["containers"][0].pop("image")
    assert problems(spec, KUBERAY["RayCluster"]) == ["spec.headGroupSpec.template is no pod template"]


@pytest.mark.parametrize("queue", [(), ("--queue", "research")])
def test_a_trainjob_holds_to_its_schema(queue: tuple[str, ...]) -> None:
    (job,) = printed(*queue, "--max", "3", "--name", "Net_1", "trainjob", "train it.py", "--epochs", "3")
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    assert job["spec"]["trainer"]["numNodes"] == 3
    assert job["spec"].get("suspend") == (True if queue else None)
    shell, flag, line = job["spec"]["trainer"]["command"]
    assert (shell, flag, line[:18]) == ("sh", "-c", "cd /shared && exec")
    words = shlex.split(line)
    asked = get_args_parser().parse_args(words[words.index("torch.distributed.run") + 1 :])
    assert (asked.training_script, asked.training_script_args) == ("train it.py", ["--epochs", "3"])
    assert config_from_args(asked)[0].max_restarts == 3


def test_the_job_is_that_of_the_scheduler() -> None:
    service, job = printed("--min", "2", "--max", "4", "--queue", "research", "job", "train.py", "--epochs", "3")
    assert models.IoK8sApiCoreV1Service.from_dict(service).to_dict() == service
    assert models.IoK8sApiBatchV1Job.from_dict(job).to_dict() == job
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[-3:] == ["train.py", "--epochs", "3"]
    assert "--nnodes=2:4" in command
    assert job["spec"]["parallelism"] == 4
    assert KIND not in job["spec"]["template"]["spec"].get("nodeSelector", {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("job",), "a script must be named for job and trainjob alone"),
        (("rayjob", "train.py"), "a script must be named for job and trainjob alone"),
        (("--min", "3", "--max", "2", "rayjob"), "--min must be at most --max. Found: 3 and 2"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(main, ["cluster", "manifest", *PLACE, *arguments])
    assert (result.exit_code, message in result.stderr) == (2, True)
