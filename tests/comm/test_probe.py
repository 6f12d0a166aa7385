"""The network as the model wants it: from played measurements, and measured once for each topology."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel.comm.bandwidth import Bandwidth, Row
from accel.comm.cost_model import probe
from accel.comm.cost_model.probe import cores_of_each, network_of
from accel.comm.ranks.topology import Topology
from tests.comm.bandwidth_ranks import row
from tests.comm.ranks import on_ranks


def rows(link: str, ranks: int, alpha_s: float, beta_s: float, message_s: float) -> list[Row]:
    """Return all-reduces of α + β S, and all-to-alls with another α."""
    return [
        row(operation, size, latency + beta_s * size, link, ranks)
        for operation, latency in (("all_reduce", alpha_s), ("all_to_all", message_s))
        for size in (4096, 1 << 20)
    ]


def test_the_bytes_that_are_sent_are_what_a_link_takes_time_for() -> None:
    speed = Bandwidth(
        ((0, 1), (2, 3)),
        tuple(
            rows("intra", 2, 1e-4, 1e-9, 1e-5) + rows("inter", 2, 2e-3, 1e-8, 1e-4) + rows("world", 4, 4e-3, 3e-8, 2e-4)
        ),
        1.0,
        ("intra", "inter", "world"),
    )
    found = network_of(speed, Topology(((0, 1), (2, 3))), cores=0.5)
    assert (found.hosts, found.ranks, found.cores, found.size) == (2, 2, 0.5, 4)
    # 2 (n - 1)/n: S for two ranks, 1.5 S for four.
    assert found.intra == pytest.approx((1e-4, 1e-5, 1e-9), rel=1e-3)
    assert found.inter == pytest.approx((2e-3, 1e-4, 1e-8), rel=1e-3)
    assert found.world == pytest.approx((4e-3, 2e-4, 2e-8), rel=1e-3)


def test_a_ring_over_all_is_no_faster_than_the_link_it_crosses() -> None:
    speed = Bandwidth(
        ((0, 1), (2, 3)),
        tuple(rows("intra", 2, 0, 1e-9, 0) + rows("inter", 2, 0, 1e-8, 0) + rows("world", 4, 0, 1e-9, 0)),
        1.0,
        ("intra", "inter", "world"),
    )
    found = network_of(speed, Topology(((0, 1), (2, 3))), cores=1.0)
    assert found.world.byte_s == found.inter.byte_s


def test_with_one_rank_a_host_one_class_stands_for_all() -> None:
    speed = Bandwidth(((0,), (1,)), tuple(rows("inter", 2, 1e-3, 1e-8, 1e-4)), 1.0, ("inter",))
    found = network_of(speed, Topology(((0,), (1,))), cores=1.0)
    assert found.intra == found.inter == found.world


@on_ranks(2)
def test_a_topology_is_measured_once_unless_a_rank_does_not_know_it(rank: int, world: int) -> None:
    topology, cpu = Topology(((0,), (1,))), torch.device("cpu")
    measure_links, calls = probe.measure_links, []

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return measure_links(*arguments, **options)

    probe.measure_links = counted
    probe._SIZES, probe._BYTES = (1 << 12, 1 << 16), 1 << 16  # as quickly as can be
    network = probe.probe(topology, cpu)
    assert probe.probe(topology, cpu) == network
    assert len(calls) == 1
    if rank == 1:
        probe._known.clear()
    both: list[Any] = [None] * world
    dist.all_gather_object(both, (network, probe.probe(topology, cpu)))
    assert both[0] == both[1]
    assert len(calls) == 2
    assert network.hosts == 2
    # Beside another process a burst may hide what a megabyte takes: a byte then takes no time.
    assert 0 <= network.world.byte_s < math.inf
    assert 0 <= network.core_byte_s < math.inf
    assert network.cores > 0


@pytest.mark.parametrize(
    ("machines", "cores", "expected"),
    [
        ("aa", [(1, {0}), (1, {1})], [1, 1]),  # pinned
        ("aa", [(2, {0, 1}), (2, {0, 1})], [1, 1]),
        ("ab", [(2, {0, 1}), (2, {0, 1})], [2, 2]),
        ("aaa", [(2, {0, 1}), (2, {0, 1}), (1, {1})], [5 / 6, 5 / 6, 1 / 3]),
        ("aa", [(2, {0, 1, 2, 3}), (2, {0, 1, 2, 3})], [1, 1]),  # a quota of two cores
    ],
)
def test_cores_that_several_ranks_may_use_are_shared_out(
    machines: str, cores: list[tuple[int, set[int]]], expected: list[float]
) -> None:
    own = [(usable, frozenset(each)) for usable, each in cores]
    assert cores_of_each(list(machines), own) == pytest.approx(expected)
