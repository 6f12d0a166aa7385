"""A job gets all nodes, and each way's times are of all its rounds."""

from __future__ import annotations

import pytest

from accel.cluster.jobs import ClusterNode, JobView
from benchmarks import cluster_resizing


def test_the_job_gets_all_nodes_there_are() -> None:
    nodes = [ClusterNode("one", 1), ClusterNode("two", 1)]
    given = cluster_resizing.everything([JobView(name="job", submitted_s=0.0, profiles={})], nodes, {}, 0.0)
    assert given == {"job": ("one", "two")}


def test_rows_have_the_median_of_rounds_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order = list[object]()

    def events(submitted: object) -> dict[str, float]:
        order.append(submitted)
        return {"submitted": float(len(order))}

    monkeypatch.setattr(cluster_resizing, "events", events)
    monkeypatch.setattr(cluster_resizing, "WAYS", {"accel": "a", "Ray Train": "b"})
    monkeypatch.setattr(cluster_resizing.importlib.util, "find_spec", lambda _: True)
    first, second = cluster_resizing.rows(3)
    assert order == ["a", "b"] * 3
    assert (first["whole_s"], first["whole"]) == (3.0, "[1.0, 5.0]")
    assert (second["way"], second["whole_s"]) == ("Ray Train", 4.0)
    monkeypatch.setattr(cluster_resizing.importlib.util, "find_spec", lambda _: None)
    assert [row["way"] for row in cluster_resizing.rows(1)] == ["accel"]
