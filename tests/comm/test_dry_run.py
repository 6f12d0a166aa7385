"""What a bucket costs: the calls are those that go over the wire, times those of this machine."""

from __future__ import annotations

import itertools

import pytest
import torch

from accel.comm.catalogue import CATALOGUE, Scheme, allowed
from accel.comm.cost_model.cost import CollectiveCall, Stages
from accel.comm.cost_model.dry_run import copy_byte_s, costs, dry_run
from accel.comm.layout import Layout
from accel.comm.powersgd import PowerSGD
from accel.comm.ranks.channel import PIECE_BYTES
from accel.comm.ranks.topology import Topology

CPU = torch.device("cpu")
PAIR, FOUR = Topology(((0,), (1,))), Topology(((0, 1), (2, 3)))


def bucket(*shapes: tuple[int, ...], index: int = 0, dtype: torch.dtype = torch.float32) -> Layout:
    names = tuple(f"p{index}.{i}" for i in range(len(shapes)))
    return Layout(index, names, tuple(map(torch.Size, shapes)), dtype, True)


def calls(found: Stages) -> list[CollectiveCall]:
    return [one.call for stage in found for one in stage if one.call is not None]


def test_half_sends_two_bytes_twice_for_each_element_of_the_others_chunks() -> None:
    found = dry_run(Scheme("half"), bucket((1 << 20,)), PAIR, CPU)
    half = 1 << 20  # of the elements, two bytes each
    assert calls(found) == [CollectiveCall("exchange", "world", 0, half, half)] * 2
    assert len(found) == 2


@pytest.mark.parametrize(("name", "parts"), [("int8", 2), ("1-bit", 1)])
def test_what_is_sent_is_what_the_encoding_says(name: str, parts: int) -> None:
    found = dry_run(Scheme(name), bucket((1024, 1024)), PAIR, CPU)
    chunk = CATALOGUE[name].make().encoded_bytes((1 << 20) // parts)  # type: ignore[attr-defined]
    # Signs go to everyone at once. With the last codes goes a byte for each parameter that says whether it was used.
    assert [one.far_bytes for one in calls(found)] == [chunk] * (parts - 1) + [chunk + 1]
    assert sum(one.core_s for stage in found for one in stage) > 0


def test_by_hosts_slices_cross_and_the_rest_stays_within() -> None:
    whole = 4 * (1 << 20)  # what ranks of a host sum goes through memory
    found = dry_run(Scheme("exact", True), bucket((1 << 20,)), FOUR, CPU)
    assert [(one.kind, one.scope, one.near_bytes, one.far_bytes) for one in calls(found)] == [
        ("ring", "across", whole / 2, 0),
    ]


def test_a_flat_exchange_of_four_goes_near_and_far() -> None:
    found = dry_run(Scheme("half"), bucket((1 << 20,)), FOUR, CPU)
    quarter = 2 * (1 << 18)
    assert [(one.near_bytes, one.far_bytes) for one in calls(found)] == [(quarter, 2 * quarter)] * 2


def test_powersgd_sends_its_factors() -> None:
    layout = bucket((1024, 1024), (1024,), (512, 2048))
    found = dry_run(Scheme("powersgd 4"), layout, PAIR, CPU)
    sent = sum(one.near_bytes + one.far_bytes for one in calls(found))
    assert sent == pytest.approx(4 * PowerSGD(rank=4).sent(layout.shapes))


def test_more_elements_than_a_message_take_more_rounds() -> None:
    small, large = (calls(dry_run(Scheme("half"), bucket((n,)), PAIR, CPU))[0] for n in (1000, 1 << 22))
    assert small.largest_bytes < PIECE_BYTES < large.largest_bytes


def test_all_ways_and_all_buckets_have_a_cost() -> None:
    layouts = [bucket((300, 300), (7,), index=0), bucket((64, 16), index=1), bucket((5,), (1000, 40), index=2)]
    ways = allowed("lossy", by_hosts=True)
    found = costs(ways, layouts, FOUR, CPU)
    assert set(found) == set(ways)
    for way, layout_costs in found.items():
        assert len(layout_costs) == len(layouts)
        for stages, layout in zip(layout_costs, layouts, strict=True):
            sent = sum(one.near_bytes + one.far_bytes for one in calls(stages))
            # Of a small bucket the slice of rank 0 may be empty, and within its host nothing is sent.
            assert (0 if way.hierarchical else 1) <= sent < 8 * 4 * layout.numel + 10_000, way


def test_without_time_left_the_largest_bucket_stands_for_the_others() -> None:
    layouts = [bucket((128, 128), index=0), bucket((512, 512), index=1), bucket((256, 256), index=2)]
    found = costs([Scheme("powersgd 4")], layouts, PAIR, CPU, budget_s=0.0)[Scheme("powersgd 4")]
    sizes = [sum(one.far_bytes + one.near_bytes for one in calls(stages)) for stages in found]
    for (one, size), (other, larger) in itertools.pairwise([(128, sizes[0]), (256, sizes[2]), (512, sizes[1])]):
        assert larger / size == pytest.approx((other / one) ** 2)


def test_a_way_that_cannot_handle_a_bucket_is_left_out() -> None:
    class Picky(PowerSGD):
        def check(self, layout: Layout) -> None:
            raise ValueError("no")

    CATALOGUE["picky"] = CATALOGUE["int8"]._replace(make=Picky)
    try:
        found = costs([Scheme("picky"), Scheme("half")], [bucket((10, 10))], PAIR, CPU)
    finally:
        del CATALOGUE["picky"]
    assert list(found) == [Scheme("half")]


@pytest.mark.sample(3)
@pytest.mark.parametrize("topology", [PAIR, FOUR], ids=["flat", "by hosts"])
@pytest.mark.parametrize("shapes", [[(0,)], [(0, 3), (2, 0)], [()], [(1,)], [(1, 2), (1,), (0,)], [(3, 3), (), (2, 1)]])
def test_buckets_of_nothing_and_of_little_have_a_cost(shapes: list[tuple[int, ...]], topology: Topology) -> None:
    for layouts in ([bucket(*shapes)], [bucket((0,)), bucket(*shapes, index=1)]):
        for budget_s in (2.0, 0.0):  # each bucket by itself, and one for all
            ways = allowed("lossy", by_hosts=topology is FOUR)
            found = costs(ways, layouts, topology, CPU, budget_s=budget_s)
            assert list(found) == ways
            seconds = [one.core_s for each in found.values() for stages in each for stage in stages for one in stage]
            assert all(0 <= one < 1 for one in seconds)
        assert copy_byte_s(layouts, CPU) >= 0
