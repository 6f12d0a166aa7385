"""The cost model on numbers that can be worked out by hand, on laws, and on steps that were measured in a lab."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.comm.cost_model.cost import (
    CollectiveCall,
    Link,
    Network,
    Profile,
    Stages,
    StageSegment,
    core_seconds,
    fair_shares,
    plain,
    scaled,
    simulate,
    transfer,
)

INTRA, INTER, WORLD = Link(0.001, 0.0001, 1e-9), Link(0.002, 0.0002, 1e-8), Link(0.004, 0.0004, 2e-8)
QUIET = Link(0.0, 0.0, 1e-6)
"""1 MB/s without latency: bytes are microseconds."""
PAIR = Network(2, 1, QUIET, QUIET, QUIET, cores=4.0)


def two_by_two(**changes: float) -> Network:
    return replace(Network(2, 2, INTRA, INTER, WORLD, cores=1.0), **changes)


def wire(nbytes: float) -> StageSegment:
    return StageSegment(0.0, CollectiveCall("exchange", "world", 0.0, nbytes, 1.0))


# Calls


@pytest.mark.parametrize(
    ("call", "link", "latency_s", "busy_s"),
    [
        # 2 (n - 1)/n of S: 2 · 3/4 over all four, 2 · 1/2 over two.
        (CollectiveCall("ring", "world", 1000), "inter", 0.004, 1.5 * 1000 * 2e-8),
        (CollectiveCall("ring", "within", 1000), "intra", 0.001, 1000 * 1e-9),
        # Both ranks of a host use its uplink at once, each for its own slice.
        (CollectiveCall("ring", "across", 1000), "inter", 0.002, 2 * 1000 * 1e-8),
        (CollectiveCall("exchange", "across", 0, 1000, 1000), "inter", 0.0002, 2 * 1000 * 1e-8),
        (CollectiveCall("exchange", "within", 1000, 0, 1000), "intra", 0.0001, 1000 * 1e-9),
        # To one rank beside, and to two on the other host, from two ranks.
        (CollectiveCall("exchange", "world", 1000, 2000, 1000), "inter", 0.0002, 1000 * 1e-9 + 2 * 2000 * 1e-8),
        # Three rounds of 1 MB.
        (CollectiveCall("exchange", "within", 2_600_000, 0, 2_600_000), "intra", 0.0003, 2_600_000 * 1e-9),
        (CollectiveCall("exchange", "within", 0), "intra", 0.0, 0.0),
    ],
)
def test_a_call_takes_what_the_formula_says(call: CollectiveCall, link: str, latency_s: float, busy_s: float) -> None:
    found = transfer(call, two_by_two())
    assert found.link == link
    assert found.latency_s == pytest.approx(latency_s)
    assert found.busy_s == pytest.approx(busy_s)


def test_copying_takes_cores_by_the_bytes_that_a_rank_sends() -> None:
    found = transfer(CollectiveCall("ring", "world", 1000), two_by_two(core_byte_s=1e-9))
    assert found.core_s == pytest.approx(1500 * 1e-9)


def test_one_host_has_no_uplink() -> None:
    alone = Network(1, 4, INTRA, INTER, INTRA, cores=1.0)
    assert transfer(CollectiveCall("ring", "world", 1000), alone).link == "intra"
    assert alone.slower(3.0).intra.byte_s == 3 * INTRA.byte_s
    assert two_by_two().slower(3.0).intra.byte_s == INTRA.byte_s
    assert two_by_two().slower(3.0).world.byte_s == 3 * WORLD.byte_s
    assert two_by_two().slower(3.0).inter.byte_s == 3 * INTER.byte_s


@pytest.mark.parametrize(("factor", "inter"), [(0.7, 1e-8), (0.5, 1e-8), (0.4, 0.8e-8)])
def test_a_ring_that_was_probed_too_slow_does_not_make_other_calls_fast(factor: float, inter: float) -> None:
    found = two_by_two().slower(factor)
    assert found.world.byte_s == pytest.approx(factor * WORLD.byte_s)
    assert found.inter.byte_s == pytest.approx(inter)


# Steps, by hand


def test_without_communication_a_step_is_its_backward_pass_and_the_rest() -> None:
    found = simulate(Profile((0, 0), (0.0, 0.5), 0.25), [((StageSegment(0.0),),)] * 2, PAIR)
    assert found.step_s == pytest.approx(0.75)
    assert found.exposed_s == pytest.approx(0.0, abs=1e-9)


def test_the_last_bucket_is_what_backward_does_not_hide() -> None:
    # 0.3 s each on the wire, ready at 0 and 1 s: the first is hidden, the second is not.
    found = simulate(Profile((300_000,) * 2, (0.0, 1.0), 0.0), [plain(300_000)] * 2, PAIR)
    assert found.done_s == pytest.approx((0.3, 1.3))
    assert found.exposed_s == pytest.approx(0.3)


def test_buckets_wait_for_each_other_where_the_wire_is_slower() -> None:
    found = simulate(Profile((600_000,) * 3, (0.0, 0.1, 0.2), 0.0), [plain(600_000)] * 3, PAIR)
    assert found.done_s == pytest.approx((0.6, 1.2, 1.8))
    assert found.exposed_s == pytest.approx(1.6)


def test_buckets_are_copied_out_in_turn_while_later_ones_are_under_way() -> None:
    copying = 1e-6  # as slow as the wire
    profile = Profile((300_000,) * 3, (0.0,) * 3, 0.0, copy_byte_s=copying)
    # Averaged at 0.3, 0.6 and 0.9: each is copied while the next one is under way, the last one after.
    assert simulate(profile, [plain(300_000)] * 3, PAIR).step_s == pytest.approx(1.2)
    # Without transfers nothing hides the copies.
    assert simulate(profile, [((StageSegment(0.0),),)] * 3, PAIR).step_s == pytest.approx(0.9)


def test_stages_of_different_buckets_overlap() -> None:
    # Two stages of 0.2 s of a core for each of three buckets, a core for each stage: (3 + 1) · 0.2.
    stages: Stages = ((StageSegment(0.2),), (StageSegment(0.2),))
    assert simulate(Profile((0,) * 3, (0.0,) * 3, 0.0), [stages] * 3, PAIR).step_s == pytest.approx(0.8)


def test_work_of_a_compressor_takes_cores_from_backward_unless_one_is_free() -> None:
    profile, ways = Profile((0, 0), (0.0, 1.0), 0.0), [((StageSegment(0.5),),), ((StageSegment(0.0),),)]
    # One core: 0.5 s of encoding at half speed, so that backward takes 1.5 s.
    assert simulate(profile, ways, replace(PAIR, cores=1.0)).ready_s[1] == pytest.approx(1.5)
    assert simulate(profile, ways, replace(PAIR, cores=2.0)).ready_s[1] == pytest.approx(1.0)


def test_copying_that_takes_a_whole_core_slows_backward_down_and_is_slowed() -> None:
    busy = replace(PAIR, cores=1.0, core_byte_s=1e-6)  # a core for all of the time on the wire
    found = simulate(Profile((1_000_000, 0), (0.0, 1.0), 0.0), [plain(1_000_000), ((StageSegment(0.0),),)], busy)
    assert found.done_s[0] == pytest.approx(2.0)
    assert found.ready_s[1] == pytest.approx(2.0)


def test_no_step_is_shorter_than_all_that_it_does_on_the_cores() -> None:
    ways: list[Stages] = [((StageSegment(0.1, CollectiveCall("exchange", "across", 0, 1_000_000)), StageSegment(0.2)),)]
    profile = Profile((0,), (0.0,), 0.25, core_s=1.0)
    network = replace(PAIR, core_byte_s=1e-7)
    assert core_seconds(ways[0], network, 2.0) == pytest.approx(0.7)
    assert simulate(profile, ways, replace(network, cores=0.5)).step_s == pytest.approx(1.4 / 0.5)
    roomy = simulate(profile, ways, replace(network, cores=16.0))
    assert roomy == simulate(profile._replace(core_s=0.0), ways, replace(network, cores=16.0))


def test_what_a_link_has_saved_up_passes_at_once() -> None:
    profile, ways = Profile((300_000,) * 2, (0.0, 0.0), 0.0), [plain(300_000)] * 2
    usual = simulate(profile, ways, PAIR)
    saving = simulate(profile, ways, replace(PAIR, burst_bytes=400_000))
    assert usual.step_s - saving.step_s == pytest.approx(400_000 * PAIR.inter.byte_s)
    assert saving.done_s[0] < usual.done_s[0]
    # No more is saved than is sent.
    assert simulate(profile, ways, replace(PAIR, burst_bytes=1e9)).step_s == pytest.approx(0.0, abs=1e-9)


# Laws


@st.composite
def steps(draw: st.DrawFn) -> tuple[Profile, list[Stages], Network]:
    count = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(1, 10**7), min_size=count, max_size=count))
    gaps = draw(st.lists(st.floats(0, 0.2), min_size=count - 1, max_size=count - 1))
    ready = [sum(gaps[:i]) for i in range(count)]
    work = draw(st.lists(st.floats(0, 0.05), min_size=count, max_size=count))
    ways: list[Stages] = [
        ((StageSegment(core, CollectiveCall("exchange", "across", 0.0, size / 4, size / 4)),), (StageSegment(core),))
        for core, size in zip(work, sizes, strict=True)
    ]
    cores = draw(st.floats(0.3, 4))
    return Profile(tuple(sizes), tuple(ready), 0.01), ways, two_by_two(cores=cores, core_byte_s=1e-10)


@given(steps())
def test_a_step_is_never_shorter_than_its_parts_and_never_longer_than_all_in_a_row(
    drawn: tuple[Profile, list[Stages], Network],
) -> None:
    profile, ways, network = drawn
    found = simulate(profile, ways, network)
    calls = [transfer(one.call, network) for way in ways for stage in way for one in stage if one.call]
    work = sum(one.core_s for way in ways for stage in way for one in stage)
    copying = sum(max(one.busy_s, one.core_s) for one in calls)
    slowest = 1 / min(network.cores, 1.0)
    least = max(profile.ready_s[-1], sum(one.busy_s for one in calls))
    most = (profile.ready_s[-1] + work + copying) * slowest + sum(one.latency_s for one in calls)
    assert profile.rest_s + least <= found.step_s * (1 + 1e-6)
    assert found.step_s <= (profile.rest_s + most) * (1 + 1e-6) + 1e-9
    assert all(done >= ready for done, ready in zip(found.done_s, found.ready_s, strict=True))


@given(steps(), st.floats(1.0, 8.0))
def test_a_slower_network_makes_no_plain_step_shorter(
    drawn: tuple[Profile, list[Stages], Network], factor: float
) -> None:
    # Of plain steps alone: where work shares cores with transfers, a later transfer may let a later bucket be earlier.
    profile, _, network = drawn
    ways = [plain(one) for one in profile.bytes]
    assert simulate(profile, ways, network.slower(factor)).step_s >= simulate(profile, ways, network).step_s * 0.999


@given(st.lists(st.floats(0, 2), max_size=6), st.floats(0.1, 4))
def test_shares_are_fair(wanted: list[float], capacity: float) -> None:
    given_ = fair_shares(wanted, capacity)
    assert all(got <= want + 1e-9 for got, want in zip(given_, wanted, strict=True))
    assert sum(given_) == pytest.approx(min(sum(wanted), capacity))
    denied = [got for got, want in zip(given_, wanted, strict=True) if got < want - 1e-9]
    if denied:  # nobody has more than one who was denied something
        assert max(given_) <= min(denied) + 1e-9


def test_a_cost_grows_with_the_bucket() -> None:
    large: Stages = ((StageSegment(0.3, CollectiveCall("exchange", "world", 0, 100, 100)),),)
    assert scaled(large, 0.5)[0][0] == StageSegment(0.15, CollectiveCall("exchange", "world", 0, 50, 50))


# Measured


@pytest.mark.parametrize(
    ("hosts", "ranks", "mb_s", "measured_s"),
    [
        # 24 layers of 1024²: DDP in network namespaces; bus bandwidth of an 8 or 64 MB all-reduce beside it.
        (2, 1, 11.9, 8.98),
        (2, 1, 119.5, 0.917),
        (2, 2, 11.9, 13.02),
        (2, 2, 119.5, 1.436),
    ],
)
def test_ddp_steps_of_a_lab_are_met(hosts: int, ranks: int, mb_s: float, measured_s: float) -> None:
    link = Link(0.0036, 0.0003, 1e-6 / mb_s)
    network = Network(hosts, ranks, link, link, link, cores=2 / (hosts * ranks))
    buckets = (29_388_800,) * 3 + (12_595_200,)
    profile = Profile(buckets, (0.0, 0.03, 0.06, 0.08), rest_s=0.09)
    step_s = simulate(profile, [plain(one) for one in buckets], network).step_s
    assert step_s == pytest.approx(measured_s, rel=0.06)
