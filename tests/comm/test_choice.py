"""The choice on played numbers: what is allowed, what wins where, and what observed plain steps say of the network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.comm.catalogue import CATALOGUE, LEVELS, Scheme, allowed, catalogue_settings, register_compressor
from accel.comm.cost_model.choice import (
    WORTH,
    ObservedStep,
    calibrated,
    mean_of,
    options,
    predict,
    worthwhile,
)
from accel.comm.cost_model.cost import CollectiveCall, Link, Network, Profile, Stages, StageSegment, plain, simulate
from accel.comm.dgc import DGC
from accel.comm.half import Half

EXACT, HALF, INT8, ONE_BIT = Scheme("exact", True), Scheme("half"), Scheme("int8"), Scheme("1-bit")
SHARE = {HALF: 1 / 2, INT8: 1 / 4, ONE_BIT: 1 / 32}
WORK = {HALF: 1e-10, INT8: 5e-10, ONE_BIT: 1e-9}
"""Seconds of a core per byte of gradient."""


def network(mb_s: float) -> Network:
    link = Link(0.001, 0.0001, 1e-6 / mb_s)
    return Network(2, 1, link, link, link, cores=2.0)


def profile(count: int = 4, backward_s: float = 0.2) -> Profile:
    return Profile((25_000_000,) * count, tuple(backward_s * i / count for i in range(count)), rest_s=0.05)


def cost(way: Scheme, nbytes: float) -> Stages:
    call = CollectiveCall("exchange", "world", 0.0, nbytes * SHARE[way], nbytes * SHARE[way])
    return ((StageSegment(nbytes * WORK[way], call), StageSegment(nbytes * WORK[way])),)


def costs(of: Profile) -> dict[Scheme, list[Stages]]:
    return {way: [cost(way, one) for one in of.bytes] for way in SHARE}


@pytest.fixture
def catalogue_put_back() -> Iterator[None]:
    before = dict(CATALOGUE)
    yield
    CATALOGUE.clear()
    CATALOGUE.update(before)


# What is allowed


def test_each_level_permits_what_the_one_before_does_and_more() -> None:
    found = [set(allowed(level, by_hosts=True)) for level in LEVELS]
    assert found[0] == set() or all(CATALOGUE[way.compressor].level == "exact" for way in found[0])
    assert found[1] == {EXACT}
    assert found[2] == {EXACT, HALF, Scheme("half", True)}
    assert found[0] < found[1] < found[2] < found[3]


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_lossy_unless_it_was_asked_for(level: str) -> None:
    for by_hosts in (False, True):
        for way in allowed(level, by_hosts=by_hosts):
            assert LEVELS.index(CATALOGUE[way.compressor].level) <= LEVELS.index(level)
            assert by_hosts or not way.hierarchical
    assert {CATALOGUE[name].level for name in ("int8", "1-bit", "powersgd 4")} == {"lossy"}


def test_lossy_ways_have_error_feedback_and_16_bits_have_none() -> None:
    for name, entry in CATALOGUE.items():
        assert catalogue_settings(Scheme(name)).error_feedback == (entry.level == "lossy"), name


def test_a_wrong_level_is_named() -> None:
    with pytest.raises(ValueError, match="allow must be one of 'exact', 'reordered', 'reduced', 'lossy', got 'any'"):
        allowed("any", by_hosts=False)


def test_own_compressors_join(catalogue_put_back: None) -> None:
    register_compressor("fp16", lambda: Half(), "reduced")
    assert Scheme("fp16") in allowed("reduced", by_hosts=False)
    assert Scheme("fp16") not in allowed("reordered", by_hosts=True)
    with pytest.raises(ValueError, match="name must be new, got 'fp16'"):
        register_compressor("fp16", Half, "reduced")
    with pytest.raises(ValueError, match="level must be 'reduced' or 'lossy', got 'exact'"):
        register_compressor("other", Half, "exact")
    with pytest.raises(ValueError, match="'whole' must see all buckets of a step"):
        register_compressor("whole", lambda: DGC(0.01, max_grad_norm=1.0), "lossy")


# What wins


@pytest.mark.parametrize(
    ("mb_s", "way"),
    [
        # 100 MB of gradients, 0.25 s of a step without communication, of which 0.15 s hide transfers.
        (1, ONE_BIT),
        (12, ONE_BIT),
        (60, ONE_BIT),
        (250, INT8),
        (400, HALF),
        (10_000, None),
    ],
)
def test_the_less_is_sent_the_slower_the_network(mb_s: float, way: Scheme | None) -> None:
    given_ = profile()
    best = options(given_, network(mb_s), costs(given_))[0]
    assert best.scheme == way


def test_work_that_costs_more_than_it_saves_is_not_chosen() -> None:
    given_, slow = profile(), replace(network(700), cores=1.0)
    dear = {
        way: [tuple(tuple(s._replace(core_s=s.core_s * 40) for s in stage) for stage in one) for one in of]
        for way, of in costs(given_).items()
    }
    found = options(given_, slow, dear)
    assert found[0].scheme is None
    assert worthwhile(found) == []


def test_of_two_that_are_about_as_fast_the_nearer_to_exact_comes_first() -> None:
    given_ = profile()
    same = {INT8: [cost(HALF, one) for one in given_.bytes], HALF: [cost(HALF, one) for one in given_.bytes]}
    assert options(given_, network(12), same)[0].scheme == HALF


@given(st.floats(0.5, 20_000), st.floats(0, 1), st.integers(1, 5))
def test_the_first_option_is_never_predicted_slower_than_ddp_by_more_than_the_models_error(
    mb_s: float, backward_s: float, count: int
) -> None:
    given_ = profile(count, backward_s)
    found = options(given_, network(mb_s), costs(given_))
    plainly = next(one for one in found if one.scheme is None)
    assert found[0].step_s <= plainly.step_s * 1.000001
    assert all(one.step_s < plainly.step_s * (1 - WORTH) for one in worthwhile(found))
    # What an option says is what the model says of its plan.
    assert all(predict(one.scheme, given_, network(mb_s), costs(given_)) == one for one in found)


# What plain steps say


@pytest.mark.parametrize("factor", [0.7, 1.0, 2.5])
@pytest.mark.parametrize("cores", [1.0, 3.0])
def test_a_network_under_load_is_recognised_by_plain_steps(factor: float, cores: float) -> None:
    truth, probed = profile(), replace(network(60), cores=cores, core_byte_s=2e-9)
    ways = [plain(one) for one in truth.bytes]
    real = simulate(truth, ways, probed.slower(factor))
    seen = ObservedStep(truth.bytes, real.ready_s, max(real.done_s), real.step_s)
    found, fitted = calibrated(seen, probed, 1.0)
    assert simulate(found, ways, fitted).step_s == pytest.approx(real.step_s, rel=0.01)
    assert fitted.inter.byte_s == pytest.approx(probed.inter.byte_s * factor, rel=0.05)
    assert found.ready_s[-1] == pytest.approx(truth.ready_s[-1], rel=0.1)


def test_a_network_that_backward_hides_stays_as_it_was_probed() -> None:
    seen = ObservedStep((1000, 1000), (0.0, 1.0), 1.001, 1.2)
    found, fitted = calibrated(seen, network(60), 1.0)
    assert fitted == network(60)
    assert found.rest_s == pytest.approx(0.199, abs=1e-4)


def test_work_of_plain_steps_counts_without_their_communication() -> None:
    probed = replace(network(60), core_byte_s=2e-9)
    seen = ObservedStep((10**8, 10**8), (0.0, 1.0), 1.001, 1.2, extra_s=0.1, core_s=1.5, own_s=1.0)
    found, fitted = calibrated(seen, probed, 2.0)
    assert (found.core_s, fitted.core_byte_s) == (pytest.approx(1.4 - 0.4), 2e-9)
    for own_s, core_s, byte_s in ((1.2, 1.1, 1.5e-9), (1.0, 1.0, 2e-9), (1.5, 1.4, 0.0)):
        found, fitted = calibrated(seen._replace(own_s=own_s), probed, 1.0)
        assert (found.core_s, fitted.core_byte_s) == (pytest.approx(core_s), pytest.approx(byte_s))
    assert calibrated(seen._replace(core_s=0.0, own_s=0.0), probed, 1.0)[0].core_s == 0


@pytest.mark.parametrize(("core_s", "busy"), [(0.2, 0.92), (0.95, 0.95), (1.2, 1.0)])
def test_cores_that_bound_a_step_are_not_in_use_all_the_time(core_s: float, busy: float) -> None:
    """Unless plain steps show that they are."""
    probed = replace(network(1000), cores=0.5)
    seen = ObservedStep((1_000_000,), (0.0,), 0.01, 2.0, 0.0, core_s, core_s)
    found, fitted = calibrated(seen, probed, 1.0)
    assert found.busy == pytest.approx(busy)
    heavy: Stages = ((StageSegment(2.0),),)
    bound = simulate(found._replace(rest_s=0.0), [heavy], fitted).step_s
    assert bound == pytest.approx((found.core_s + 2.0) / 0.5 / busy)


def test_ranks_are_averaged() -> None:
    one, other = ObservedStep((5,), (0.0,), 1.0, 2.0), ObservedStep((5,), (0.0,), 3.0, 2.5)
    assert mean_of([one, other]) == ObservedStep((5,), (0.0,), 2.0, 2.25)
