"""On which nodes replicas stand."""

from __future__ import annotations

from accel.cluster.policy import Share, place
from tests.accel.cluster.cluster_cases import hosts


def shares(**sizes: int) -> dict[str, Share]:
    return {name: Share("gpu", size) for name, size in sizes.items()}


def test_a_job_goes_where_it_just_fits() -> None:
    found = place(shares(a=3, b=1, c=4), hosts(2), {})
    assert found["c"] in (("node-00",) * 4, ("node-01",) * 4)
    assert set(found["a"]) == set(found["b"])


def test_who_keeps_its_size_stays() -> None:
    current = {"a": ("node-01", "node-01")}
    found = place(shares(a=2, b=4), hosts(2), current)
    assert found == {"a": ("node-01", "node-01"), "b": ("node-00",) * 4}


def test_small_jobs_are_moved_together_for_one_that_needs_a_whole_node() -> None:
    current = {"a": ("node-00",) * 2, "b": ("node-01",) * 2}
    found = place(shares(a=2, b=2, c=4), hosts(2), current)
    assert len(set(found["c"])) == 1
    assert set(found["a"]) == set(found["b"])


def test_fixed_jobs_are_not_moved_and_others_take_what_is_left() -> None:
    current = {"a": ("node-00",) * 2, "b": ("node-01",) * 2}
    found = place(shares(a=2, b=2, c=4), hosts(2), current, fixed=("a", "b"))
    assert {name: found[name] for name in current} == current
    assert sorted(found["c"]) == ["node-00", "node-00", "node-01", "node-01"]


def test_links_are_not_shared_if_asked() -> None:
    current = {"a": ("node-00",) * 2, "b": ("node-01",) * 2, "c": ("node-02",) * 2}
    sizes = shares(a=2, b=2, c=2, d=3, e=3)
    apart = place(sizes, hosts(3), current, fixed=current, keeps_links_apart=True)
    linked = [set(given) for given in apart.values() if len(set(given)) > 1]
    assert not any(one & other for one in linked for other in linked if one is not other)
    assert len(place(sizes, hosts(3), current, fixed=current)["e"]) == 3
