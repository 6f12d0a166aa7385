"""The manifests hold to the published schemas of Kubeflow Trainer, JobSet and Kubernetes.

The models of kubeflow-trainer-api drop a field that they don't know, so what they read must come out again as it went
in. They know types and required fields; they know no allowed words and none of the rules that the API server checks in
CEL.
"""

from __future__ import annotations

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


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_holds_to_its_schema(path: Path) -> None:
    assert fits(load(path))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("apiVersion", "trainer.kubeflow.org/v1"),
        ("kind", "Job"),
        ("spec.runtimeRefs", {}),
        ("spec.trainer.numNodes", "two"),
        ("spec.trainer.command", "torchrun"),
        ("spec.trainer.elasticPolicy", {"minNodes": 2, "maxNodes": 4}),  # Trainer has removed it
    ],
)
def test_what_no_schema_knows_is_refused(place: str, value: object) -> None:
    manifest = load(FOLDER / "trainjob.yaml")
    *parents, last = place.split(".")
    part = manifest
    for key in parents:
        part = part[key]
    part[last] = value
    assert not fits(manifest)
