"""Which job gets how many replicas."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.cluster.jobs import ClusterNode, JobView
from accel.cluster.policy import PolicyOptions, _knapsack, allocate
from accel.errors import InvalidArgument
from tests.accel.cluster.cluster_cases import hosts, job, profile

CLUSTERS = [hosts(1), hosts(3), hosts(2, 8), hosts(2) + hosts(2, 8, kind="big", speed=3.0, is_spot=True)]


@st.composite
def jobs_at_work(draw: Any) -> tuple[list[JobView], list[ClusterNode], dict[str, tuple[str, ...]]]:
    nodes = draw(st.sampled_from(CLUSTERS))
    jobs = []
    for number in range(draw(st.integers(1, 8))):
        least = draw(st.integers(1, 3))
        known = draw(st.booleans())
        left = draw(st.one_of(st.none(), st.floats(1.0, 1e6)))
        seen = profile(draw(st.sampled_from([10.0, 3000.0])), most=draw(st.integers(1, 8)), left=left)
        jobs.append(
            job(
                f"job-{number}",
                profiles={draw(st.sampled_from(["gpu", "big"])): seen} if known else {},
                min_replicas=least,
                max_replicas=least + draw(st.integers(0, 9)),
                is_preemptible=draw(st.booleans()),
                deadline_s=draw(st.one_of(st.none(), st.floats(0.0, 1e5))),
            )
        )
    free = Counter({node.name: node.gpus for node in nodes})
    current = {}
    for each in jobs:  # as an earlier round may have left it, on nodes of one kind
        name = draw(st.sampled_from([node.name for node in nodes]))
        count = min(free[name], each.max_replicas)
        if count >= each.min_replicas and draw(st.booleans()):
            current[each.name] = (name,) * count
            free[name] -= count
    return jobs, nodes, current


@given(jobs_at_work())
def test_no_node_is_overfull_and_nobody_gets_what_it_can_not_use(situation: Any) -> None:
    jobs, nodes, current = situation
    found = allocate(jobs, nodes, current, 1000.0)
    used = Counter(name for given in found.values() for name in given)
    assert all(used[node.name] <= node.gpus for node in nodes)
    kinds = {node.name: node.kind for node in nodes}
    for each in jobs:
        given = found.get(each.name, ())
        assert not given or each.min_replicas <= len(given) <= each.max_replicas
        assert len({kinds[name] for name in given}) <= 1
        if not each.is_preemptible and each.name in current:
            assert given == current[each.name]
    assert found == allocate(jobs, nodes, current, 1000.0)


@given(jobs_at_work())
def test_what_has_been_given_is_kept_while_nothing_changes(situation: Any) -> None:
    jobs, nodes, current = situation
    nodes = [node for node in nodes if node.kind == "gpu"]
    found = allocate(jobs, nodes, current, 1000.0)
    again = allocate(jobs, nodes, found, 1000.0)
    moved = sum(len(again.get(name, ())) == len(given) and again[name] != given for name, given in found.items())
    assert moved == 0


@given(st.data())
def test_the_sizes_are_the_best_ones(data: st.DataObject) -> None:
    most = data.draw(st.integers(0, 9))
    jobs = [
        (np.array(sizes), np.array([data.draw(st.floats(0.0, 10.0)) for _ in sizes]))
        for sizes in data.draw(
            st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True).map(sorted), max_size=4)
        )
    ]
    ways = itertools.product(*([(0, 0.0), *zip(sizes.tolist(), gains.tolist(), strict=True)] for sizes, gains in jobs))
    best = max(sum(gain for _, gain in way) for way in ways if sum(size for size, _ in way) <= most)
    picked = _knapsack(jobs, most)
    gains = [
        dict(zip(sizes.tolist(), own.tolist(), strict=True)).get(size, 0.0)
        for size, (sizes, own) in zip(picked, jobs, strict=True)
    ]
    assert sum(picked) <= most
    assert sum(gains) == pytest.approx(best)


def test_the_shortest_gets_the_most_and_nothing_is_left_over() -> None:
    jobs = [job("long", 1e7), job("short", 1e5), job("middle", 1e6)]
    sizes = {name: len(given) for name, given in allocate(jobs, hosts(4), {}, 0.0).items()}
    assert sizes["short"] > sizes["middle"] > sizes.get("long", 0)
    assert sum(sizes.values()) == 16


def test_a_small_gain_is_not_worth_a_restart() -> None:
    jobs, nodes = [job("a"), job("b")], hosts(2)
    apart = {"a": ("node-00",) * 4, "b": ("node-01",) * 4}
    assert allocate(jobs, nodes, apart, 0.0) == apart
    assert allocate(jobs, nodes, {**apart, "a": ("node-00",) * 3}, 0.0)["b"] == apart["b"]


@pytest.mark.parametrize(("restart_s", "replicas"), [(300.0, 3), (0.1, 4)])
def test_what_a_resize_has_cost_decides_whether_it_is_made(restart_s: float, replicas: int) -> None:
    costly = dataclasses.replace(profile(left=10_000.0), restart_s=restart_s)
    jobs = [job("a", profiles={"gpu": costly})]
    assert len(allocate(jobs, hosts(1), {"a": ("node-00",) * 3}, 0.0)["a"]) == replicas


def test_a_job_that_would_miss_its_deadline_comes_first() -> None:
    jobs = [job("late", 1e5, deadline_s=500.0), *(job(f"other-{number}", 9e4) for number in range(7))]
    by_deadline = len(allocate(jobs, hosts(2), {}, 0.0).get("late", ()))
    without = len(allocate([job("late", 1e5), *jobs[1:]], hosts(2), {}, 0.0).get("late", ()))
    assert by_deadline > without


def test_a_new_job_gets_one_replica_and_then_at_most_twice_what_it_has_shown() -> None:
    new = job("new", None, profiles={}, max_replicas=1)
    assert len(allocate([new], hosts(4), {}, 0.0)["new"]) == 1
    seen = job("new", None, profiles={"gpu": profile(most=2)})
    assert len(allocate([seen], hosts(4), {}, 0.0)["new"]) == 4


def test_another_kind_of_gpu_is_reckoned_with_by_its_speed() -> None:
    nodes = [*hosts(1), *hosts(1, 4, kind="big", speed=3.0)]
    found = allocate([job("a", max_replicas=4)], nodes, {}, 0.0)
    assert set(found["a"]) == {"big-00"}


def test_what_a_job_has_measured_counts_on_a_kind_that_it_was_not_measured_on() -> None:
    """The scheduler does not know on which kind that was, and names it "gpu"."""
    slow_links = job("a", profiles={"gpu": profile(sync_s=3.0, left=10_000.0)}, max_replicas=2)
    for kind in ("gpu", "A100"):
        assert len(allocate([slow_links], hosts(1, kind=kind), {}, 0.0)["a"]) == 1


def test_jobs_that_are_alike_share_the_kinds_of_gpu() -> None:
    nodes = [*hosts(1, kind="A100"), *hosts(1, kind="V100", speed=0.9)]
    found = allocate([job("a"), job("b")], nodes, {}, 0.0)
    assert sorted(found.values()) == [("A100-00",) * 4, ("V100-00",) * 4]


def test_spot_nodes_are_used_last() -> None:
    nodes = [ClusterNode("a-spot", 4, is_spot=True), ClusterNode("b", 4)]
    assert set(allocate([job("a", max_replicas=4)], nodes, {}, 0.0)["a"]) == {"b"}


def test_nodes_that_are_gone_are_not_used() -> None:
    found = allocate([job("a", is_preemptible=False)], hosts(1), {"a": ("gone",) * 4}, 0.0)
    assert set(found["a"]) == {"node-00"}


def test_a_policy_does_not_look_at_the_tables() -> None:
    """It could not even import them."""
    code = "import sys, accel.cluster.policy; print([name for name in sys.modules if 'cluster' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "profiles" not in done.stdout
    assert "simulator" not in done.stdout


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: allocate([job("a"), job("a")], hosts(1), {}, 0.0), "a name of its own"),
        (lambda: allocate([job("a")], [*hosts(1), *hosts(1)], {}, 0.0), "a name of its own"),
        (lambda: job("a", min_replicas=3, max_replicas=2), "1 ≤ min_replicas ≤ max_replicas"),
        (lambda: job("a", weight=0.0), "weight must be positive"),
        (lambda: ClusterNode("a", 0), "at least 1 GPU"),
        (lambda: ClusterNode("a", 1, speed=-1.0), "speed must be positive"),
        (lambda: PolicyOptions(exponent=1.0), r"exponent must be in \(0, 1\)"),
        (lambda: PolicyOptions(life_s=0.0), "life_s must be positive"),
    ],
)
def test_what_can_not_be(call: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        call()
