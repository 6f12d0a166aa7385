"""Sizes of buckets: what other sizes hold, when another is better, and the change to it on real ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.comm.catalogue import Scheme
from accel.comm.cost_model.choice import CAPS_MB, in_better_buckets, rebucketed
from accel.comm.cost_model.cost import CollectiveCall, Link, Network, Profile, Stages, StageSegment
from tests.comm import bucket_cases
from tests.comm.ranks import run_ranks

MB = 1 << 20
LINK = Link(ring_s=0.003, message_s=0.0003, byte_s=1e-8)
NETWORK = Network(2, 1, LINK, LINK, LINK, cores=2.0)
PROFILE = Profile((1 * MB, 25 * MB, 25 * MB, 25 * MB, 24 * MB), (0.0, 0.05, 0.1, 0.15, 0.2), rest_s=0.1)


@given(st.lists(st.integers(MB, 60 * MB), min_size=1, max_size=6), st.sampled_from(CAPS_MB))
def test_other_buckets_hold_the_same_gradients_in_the_same_time(sizes: list[int], cap: int) -> None:
    profile = Profile(tuple(sizes), tuple(0.01 * i for i in range(len(sizes))), rest_s=10.0)
    moved, exact = rebucketed(profile, cap * MB)
    assert sum(moved.bytes) == pytest.approx(sum(sizes), abs=len(moved.bytes))
    assert max(exact) <= cap * MB
    assert moved.ready_s[0] == 0.0
    assert list(moved.ready_s) == sorted(moved.ready_s)
    # Work is only cut elsewhere.
    assert moved.rest_s + moved.ready_s[-1] == pytest.approx(profile.rest_s + profile.ready_s[-1])


def test_the_first_bucket_is_the_small_one_that_ddp_makes() -> None:
    moved, _ = rebucketed(PROFILE, 10 * MB)
    assert moved.bytes == (1 * MB, *(10 * MB,) * 9, 9 * MB)


def test_nothing_is_advised_where_the_size_hardly_matters() -> None:
    assert in_better_buckets(None, PROFILE, NETWORK, {}) is None


def test_an_expensive_start_asks_for_large_buckets() -> None:
    slow = Link(ring_s=0.2, message_s=0.2, byte_s=1e-10)
    found = in_better_buckets(None, PROFILE, Network(2, 1, slow, slow, slow, cores=2.0), {})
    assert found is not None
    assert found.cap_mb == 100
    assert in_better_buckets(None, PROFILE, Network(2, 1, slow, slow, slow, cores=2.0), {}, 100.0) is None


def test_a_late_last_bucket_asks_for_small_ones() -> None:
    # As fast as backward: all but the last bucket is hidden, so that this one should be small.
    fast = Link(ring_s=0.0, message_s=0.0, byte_s=0.2 / (99 * MB))
    found = in_better_buckets(None, PROFILE, Network(2, 1, fast, fast, fast, cores=2.0), {})
    assert found is not None
    assert found.cap_mb < 25


def test_a_compressor_that_leaves_little_to_send_and_starts_slowly_wants_larger_ones() -> None:
    def cost(nbytes: float) -> Stages:
        return (
            (StageSegment(0.05 + nbytes * 1e-11, CollectiveCall("exchange", "world", 0.0, nbytes / 32, nbytes / 32)),),
        )

    way = Scheme("1-bit")
    found = in_better_buckets(way, PROFILE, NETWORK, {way: [cost(one) for one in PROFILE.bytes]})
    assert found is not None
    assert found.cap_mb > 25


def test_nothing_is_said_of_a_compressor_that_looks_at_shapes() -> None:
    from accel.comm import catalogue
    from accel.comm.half import Half

    before = dict(catalogue.CATALOGUE)
    try:
        catalogue.register("shapely", Half, "reduced")
        assert in_better_buckets(Scheme("shapely"), PROFILE, NETWORK, {}) is None
    finally:
        catalogue.CATALOGUE.clear()
        catalogue.CATALOGUE.update(before)


# On real ranks


def test_buckets_change_and_no_residual_is_lost() -> None:
    for found in run_ranks(bucket_cases.resized, 2):
        for name, one in found.items():
            kept = name == "static"  # a static graph is more than a new reducer knows
            assert one["can"] is not kept
            assert one["sizes"] == (25, 25 if kept else bucket_cases.SMALL_MB, 25), name
            first, between, last = one["counts"]
            assert (between > first) is not kept, name
            assert first == last, name
            # Twelve steps in float32.
            assert one["law"] < 1e-5, name
            assert one["same"], name


def test_buckets_change_without_a_hook_and_not_before_they_are_wanted() -> None:
    for found in run_ranks(bucket_cases.without_hook, 2):
        assert found["same"]
        assert found["put back"]
        assert (found["taken back"], found["waiting"]) == (25, 25)
        assert found["refused"] == "ValueError: bucket_cap_mb must be positive, got 0"
        assert found.get("listed", False) is False


@pytest.mark.parametrize("helps", [True, False])
def test_a_size_that_is_predicted_to_help_stays_if_it_does(helps: bool) -> None:
    for found in run_ranks(bucket_cases.searched, 2, helps):
        assert found["same"]
        assert (found["plan"], found["hooks"]) == ("plain", 0)
        assert found["cap"] == (bucket_cases.SMALL_MB if helps else 25)
        start = (
            "gradients: DDP's own all-reduce in buckets of 0.004 MB, a step takes" if helps else "gradients: left as"
        )
        assert found["verdict"].startswith(start)
        line = next(line for line in found["explained"].splitlines() if line.startswith("plain in buckets of 0.004 MB"))
        assert ("<- chosen" in line) == helps
        assert line.count(" ms") == 3
