"""The manifests hold to the published schemas of Kubeflow Trainer, JobSet and Kubernetes.

The models of kubeflow-trainer-api drop a field that they don't know, so what they read must come out again as it went
in. They know types and required fields; they know no allowed words and none of the rules that the API server checks in
CEL.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.manifests import FOLDER, MANIFESTS, Manifest, load

models = pytest.importorskip(
    "kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api (pip install -e '.[dev]')"
)

SCHEMAS = {
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): models.TrainerV1alpha1TrainJob,
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): models.JobsetV1alpha2JobSet,
    ("v1", "PersistentVolumeClaim"): models.IoK8sApiCoreV1PersistentVolumeClaim,
}

# Their keys are the user's own, so that a typo in one is no error of form.
FREE = {"labels", "limits", "requests"}

Place = tuple[str | int, ...]


def fits(manifest: Manifest) -> bool:
    """Tell whether the schema of its kind knows all of a manifest."""
    schema = SCHEMAS.get((manifest["apiVersion"], manifest["kind"]))
    if schema is None:
        return False
    try:
        read: Manifest = schema.from_dict(manifest).to_dict()
    except (AttributeError, TypeError, ValueError):  # the last is that of pydantic, the others those of from_dict
        return False
    return read == manifest


def places(part: object, at: Place = ()) -> Iterator[Place]:
    """Yield the place of everything in a manifest but its root."""
    entries = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for key, inner in entries:
        yield (*at, key)
        yield from places(inner, (*at, key))


def at(manifest: Manifest, place: Place) -> object:
    part: object = manifest
    for key in place:
        part = part[key]  # type: ignore[index]
    return part


def with_typo(manifest: Manifest, place: Place) -> Manifest:
    manifest = copy.deepcopy(manifest)
    parent = at(manifest, place[:-1])
    assert isinstance(parent, dict)
    parent[f"{place[-1]}s"] = parent.pop(place[-1])
    return manifest


def with_wrong_type(manifest: Manifest, place: Place) -> Manifest:
    manifest = copy.deepcopy(manifest)
    # A list stands for no text, number, truth value or mapping, and a mapping for no list.
    at(manifest, place[:-1])[place[-1]] = {"a": "b"} if isinstance(at(manifest, place), list) else [["a"]]  # type: ignore[index]
    return manifest


def with_text_for_number(manifest: Manifest, place: Place) -> Manifest:
    manifest = copy.deepcopy(manifest)
    value = at(manifest, place)
    at(manifest, place[:-1])[place[-1]] = "one" if isinstance(value, int) else 1  # type: ignore[index]
    return manifest


def without(manifest: Manifest, place: Place) -> Manifest:
    manifest = copy.deepcopy(manifest)
    del at(manifest, place[:-1])[place[-1]]  # type: ignore[attr-defined]
    return manifest


def is_free(place: Place) -> bool:
    return bool(FREE & set(place[:-1]))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_holds_to_its_schema(path: Path) -> None:
    assert fits(load(path))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_typo_in_any_field_is_refused(path: Path) -> None:
    manifest = load(path)
    assert fits(manifest)
    fields = [place for place in places(manifest) if isinstance(place[-1], str) and not is_free(place)]
    assert len(fields) > 5
    assert not [place for place in fields if place[0] in {"metadata", "spec"} and fits(with_typo(manifest, place))]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_wrong_type_anywhere_is_refused(path: Path) -> None:
    manifest = load(path)
    assert fits(manifest)
    inside = [place for place in places(manifest) if place[0] in {"metadata", "spec"}]
    assert not [place for place in inside if fits(with_wrong_type(manifest, place))]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_text_for_a_number_and_a_number_for_text_are_refused(path: Path) -> None:
    manifest = load(path)
    assert fits(manifest)
    scalars = [
        place
        for place in places(manifest)
        # A quantity may be a number, and a port a name.
        if isinstance(at(manifest, place), str | int) and place[0] in {"metadata", "spec"} and not is_free(place)
    ]
    assert not [
        place
        for place in scalars
        if place[-1] not in {"sizeLimit", "port"} and fits(with_text_for_number(manifest, place))
    ]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("trainjob", "spec.runtimeRef"),
        ("trainjob", "spec.runtimeRef.name"),
        ("trainjob", "spec.runtimePatches.0.manager"),
        ("jobset-c10d", "spec.replicatedJobs.0.name"),
        ("jobset-c10d", "spec.replicatedJobs.0.template"),
        ("jobset-c10d", "spec.replicatedJobs.0.template.spec.template"),
        ("jobset-c10d", "spec.replicatedJobs.0.template.spec.template.spec.containers"),
        ("jobset-c10d", "spec.replicatedJobs.0.template.spec.template.spec.containers.0.name"),
        ("jobset-c10d", "spec.replicatedJobs.0.template.spec.template.spec.containers.0.env.0.name"),
        ("jobset-c10d", "spec.replicatedJobs.0.template.spec.template.spec.containers.0.ports.0.containerPort"),
        ("jobset-c10d", "spec.replicatedJobs.0.template.spec.template.spec.volumes.0.name"),
        ("jobset-etcd", "spec.replicatedJobs.1.dependsOn.0.status"),
    ],
)
def test_a_required_field_that_is_missing_is_refused(name: str, place: str) -> None:
    manifest = load(FOLDER / f"{name}.yaml")
    assert fits(manifest)
    assert not fits(without(manifest, tuple(int(key) if key.isdigit() else key for key in place.split("."))))


def test_the_policy_that_trainer_has_removed_is_refused() -> None:
    manifest = load(FOLDER / "trainjob.yaml")
    manifest["spec"]["trainer"]["elasticPolicy"] = {"minNodes": 2, "maxNodes": 4}
    assert not fits(manifest)


@pytest.mark.parametrize("field", ["apiVersion", "kind"])
def test_a_kind_without_a_schema_is_refused(field: str) -> None:
    manifest = load(FOLDER / "trainjob.yaml")
    manifest[field] += "x"
    assert not fits(manifest)
