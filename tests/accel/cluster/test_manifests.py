"""Manifests from one description hold to the published schemas, and say what they are to say."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from accel.cluster.manifests import KIND
from accel.commands.cli import main
from accel.commands.cluster import up

models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
ROOT = Path(__file__).parents[3]
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


def test_the_ray_job_holds_to_kuberay_s_schema() -> None:
    spec = yaml.safe_load((ROOT / "examples" / "cluster" / "rayjob.yaml").read_text(encoding="utf-8"))["spec"]
    assert problems(spec, KUBERAY["RayJob"]) == []
    words = shlex.split(spec["entrypoint"])
    parsed = up.make_context("up", words[words.index("up") + 1 :])
    assert (parsed.params["address"], str(parsed.params["folder"])) == ("auto", "/shared/.accel-cluster")
    cluster = spec["rayClusterSpec"]
    assert problems({**cluster, "enableInTreeAutoscalin": True}, KUBERAY["RayCluster"]) == [
        "spec has enableInTreeAutoscalin"
    ]
    assert problems({**cluster, "rayVersion": 2.6}, KUBERAY["RayCluster"]) == ["spec.rayVersion is no string"]


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
        (("job",), "Missing argument 'ARGUMENTS"),
        (("rayjob", "train.py"), "'rayjob' is not 'job'"),
        (("--min", "3", "--max", "2", "job", "train.py"), "replicas must have 1 ≤ min ≤ max. Found: 3 and 2"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(main, ["cluster", "manifest", *PLACE, *arguments])
    assert (result.exit_code, message in result.stderr) == (2, True)
