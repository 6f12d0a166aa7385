"""Advice on the size of buckets: what other sizes hold, and when another than DDP's own is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.comm.bucket_size import CAPS_MB, bucket_cap_mb, rebucketed
from accel.comm.catalogue import Way
from accel.comm.cost import Call, Link, Network, Profile, Segment, Stages

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
    assert bucket_cap_mb(None, PROFILE, NETWORK, {}) == 25


def test_an_expensive_start_asks_for_large_buckets() -> None:
    slow = Link(ring_s=0.2, message_s=0.2, byte_s=1e-10)
    assert bucket_cap_mb(None, PROFILE, Network(2, 1, slow, slow, slow, cores=2.0), {}) == 100


def test_a_late_last_bucket_asks_for_small_ones() -> None:
    # As fast as backward: all but the last bucket is hidden, so that this one should be small.
    fast = Link(ring_s=0.0, message_s=0.0, byte_s=0.2 / (99 * MB))
    assert bucket_cap_mb(None, PROFILE, Network(2, 1, fast, fast, fast, cores=2.0), {}) < 25


def test_a_compressor_that_leaves_little_to_send_and_starts_slowly_wants_larger_ones() -> None:
    def cost(nbytes: float) -> Stages:
        return ((Segment(0.05 + nbytes * 1e-11, Call("exchange", "world", 0.0, nbytes / 32, nbytes / 32)),),)

    way = Way("1-bit")
    assert bucket_cap_mb(way, PROFILE, NETWORK, {way: [cost(one) for one in PROFILE.bytes]}) > 25


def test_nothing_is_said_of_a_compressor_that_looks_at_shapes() -> None:
    from accel.comm import catalogue
    from accel.comm.half import Half

    before = dict(catalogue.CATALOGUE)
    try:
        catalogue.register("shapely", Half, "reduced")
        assert bucket_cap_mb(Way("shapely"), PROFILE, NETWORK, {}) == 25
    finally:
        catalogue.CATALOGUE.clear()
        catalogue.CATALOGUE.update(before)
