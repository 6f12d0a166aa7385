"""Goodput and its best batch: laws, every whole number as the oracle, limits, what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.errors import InvalidArgument
from accel.goodput.efficiency import Bound, NoiseInterval, efficiency
from accel.goodput.goodput import BatchLimits, Goodput
from accel.goodput.throughput import ThroughputModel
from tests.accel.goodput.goodput_cases import TYPICAL, models, noises, placements

RELATIVE = 1e-9
NOISE = NoiseInterval(2000.0, 1200.0, 3500.0)
GOODPUT = Goodput(TYPICAL, NOISE, base_batch=128)
bounds = st.sampled_from(["phi", "low", "high"])


@st.composite
def limits(draw: st.DrawFn, base_batch: int) -> BatchLimits:
    local_min = draw(st.integers(1, 20))
    return BatchLimits(
        max_batch_size=draw(st.none() | st.integers(base_batch, 3000)),
        local_min=local_min,
        local_max=draw(st.none() | st.integers(local_min, 300)),
        max_accumulation=draw(st.integers(0, 15)),
        min_gradients=draw(st.integers(1, 2)),
    )


def every_goodput(
    goodput: Goodput, nodes: int, replicas: int, limits: BatchLimits, bound: Bound
) -> dict[tuple[int, int], float]:
    """Return the goodput of every (local batch, accumulation) within the limits, one after the other."""
    base, most = goodput.base_batch, limits.max_batch_size or goodput.base_batch
    table = {}
    for extra in range(limits.max_accumulation + 1):
        gradients = replicas * (extra + 1)
        for local in range(limits.local_min, min(limits.local_max or most, most) + 1):
            # The user's batch need not be a multiple: ranks then share it unevenly.
            batch = most if gradients * local > most and gradients * (local - 1) < base else gradients * local
            if not (base <= batch <= most and gradients <= batch):
                continue
            if batch > base and gradients < limits.min_gradients:
                continue
            step = goodput.model.step_s(nodes, replicas, local, extra)
            table[local, extra] = batch / step * efficiency(batch, base, goodput.noise.at(batch, bound))
    return table


@settings(max_examples=30)
@given(models(), noises(), placements(), st.integers(1, 300), bounds, st.data())
def test_best_is_the_best_of_all_whole_numbers(
    model: ThroughputModel,
    noise: NoiseInterval,
    placement: tuple[int, int],
    base_batch: int,
    bound: Bound,
    data: st.DataObject,
) -> None:
    goodput, bounded = Goodput(model, noise, base_batch), data.draw(limits(base_batch))
    table = every_goodput(goodput, *placement, bounded, bound)
    if not table:
        with pytest.raises(InvalidArgument, match=r"no batch of \d+ samples or more is within the limits on \d+"):
            goodput.best(*placement, bounded, bound=bound)
        return
    best = goodput.best(*placement, bounded, bound=bound)
    assert best.goodput == pytest.approx(max(table.values()), rel=1e-6)
    assert table[best.local_batch, best.accumulation] == pytest.approx(best.goodput, rel=RELATIVE)
    assert best.throughput * best.efficiency == pytest.approx(best.goodput, rel=RELATIVE)
    assert base_batch <= best.batch <= (bounded.max_batch_size or base_batch)


@settings(max_examples=30)
@given(models(), noises(), placements(), st.integers(1, 300), st.data())
def test_accumulation_only_where_it_is_needed(
    model: ThroughputModel, noise: NoiseInterval, placement: tuple[int, int], base_batch: int, data: st.DataObject
) -> None:
    goodput, bounded = Goodput(model, noise, base_batch), data.draw(limits(base_batch))
    if not every_goodput(goodput, *placement, bounded, "phi"):
        return
    best = goodput.best(*placement, bounded)
    assert 0 <= best.accumulation <= bounded.max_accumulation
    if bounded.local_max is None and placement[1] >= bounded.min_gradients and best.accumulation:
        # The same samples at once would have been a batch that is allowed, no slower, and came first.
        pytest.fail(f"accumulates without need: {best}")


@settings(max_examples=25)
@given(models(), noises(), placements(), st.integers(1, 1000), st.integers(1, 1000), st.integers(0, 15), bounds)
def test_goodput_is_throughput_times_efficiency(
    model: ThroughputModel,
    noise: NoiseInterval,
    placement: tuple[int, int],
    base_batch: int,
    local: int,
    extra: int,
    bound: Bound,
) -> None:
    batch = placement[1] * local * (extra + 1)
    goodput = Goodput(model, noise, min(base_batch, batch))
    throughput = model.throughput(*placement, local, extra)
    worth = efficiency(batch, goodput.base_batch, noise.at(batch, bound))
    predicted = goodput.predict(*placement, local, extra, bound=bound)
    assert type(predicted) is float
    assert predicted == pytest.approx(throughput * worth, rel=RELATIVE)
    assert 0 <= predicted <= throughput


def test_arrays_are_predicted_at_once() -> None:
    local, extra = np.array([16, 32, 64]), np.array([[0], [3]])
    table = GOODPUT.predict(2, 8, local, extra, communication_scale=0.5)
    assert table.shape == (2, 3)
    assert table[1, 2] == pytest.approx(GOODPUT.predict(2, 8, 64, 3, communication_scale=0.5), rel=1e-12)


def test_many_placements_are_searched_at_once() -> None:
    bounded = BatchLimits(max_batch_size=8192, local_max=256, max_accumulation=4)
    nodes, replicas = np.array([1, 1, 2, 4, 16]), np.array([1, 3, 8, 7, 64])
    found = GOODPUT.search(nodes, replicas, bounded)
    for row, placement in enumerate(zip(nodes.tolist(), replicas.tolist(), strict=True)):
        best = GOODPUT.best(*placement, bounded)
        assert (best.local_batch, best.accumulation) == (found.local_batch[row], found.accumulation[row])
        assert best.goodput == pytest.approx(found.goodput[row], rel=1e-12)


@pytest.mark.parametrize("replicas", [1, 3, 7, 128])
def test_without_limits_the_users_batch_stays(replicas: int) -> None:
    best = GOODPUT.best(1, replicas)
    assert (best.batch, best.local_batch, best.accumulation) == (128, math.ceil(128 / replicas), 0)
    assert best.efficiency == 1.0


def test_memory_makes_the_users_batch_accumulate() -> None:
    best = GOODPUT.best(1, 1, BatchLimits(local_max=20, max_accumulation=15))
    assert (best.batch, best.local_batch, best.accumulation) == (128, 19, 6)


def test_one_replica_accumulates_once_where_the_noise_must_be_measured() -> None:
    one = BatchLimits(max_batch_size=4096, max_accumulation=15, min_gradients=2)
    slow_to_start = Goodput(dataclasses.replace(TYPICAL, compute_fixed_s=0.5), NOISE, 128)
    best = slow_to_start.best(1, 1, one)
    assert (best.batch > 128, best.accumulation) == (True, 1)
    assert slow_to_start.best(1, 2, one).accumulation == 0
    assert slow_to_start.best(1, 1, dataclasses.replace(one, max_accumulation=0)).batch == 128


def test_the_bound_decides_how_far_the_batch_grows() -> None:
    bounded = BatchLimits(max_batch_size=100_000)
    low, phi, high = (GOODPUT.best(4, 16, bounded, bound=bound).batch for bound in ("low", "phi", "high"))
    assert 128 < low < phi < high < 100_000
    pure_noise = Goodput(TYPICAL, NoiseInterval(math.inf, 1200.0, math.inf), 128)
    assert pure_noise.best(4, 16, bounded).batch == 100_000
    assert pure_noise.best(4, 16, bounded, bound="low").batch == low


def test_cheaper_communication_needs_a_smaller_batch() -> None:
    bounded = BatchLimits(max_batch_size=100_000)
    plain, packed = (GOODPUT.best(4, 16, bounded, communication_scale=scale) for scale in (1.0, 0.1))
    assert packed.batch < plain.batch
    assert packed.goodput > plain.goodput


def test_a_huge_range_is_searched_to_single_samples() -> None:
    goodput = Goodput(TYPICAL, NoiseInterval(3e6, 3e6, 3e6), 128)
    best = goodput.best(4, 16, BatchLimits(max_batch_size=10**9))
    around = goodput.predict(4, 16, best.local_batch + np.arange(-50, 51))
    assert around.argmax() == 50
    grid = np.unique(np.geomspace(8, 10**9 / 16, 5000).astype(int))
    assert best.goodput >= goodput.predict(4, 16, grid).max()


@pytest.mark.parametrize(
    ("placement", "bounded"),
    [
        ((1, 1), BatchLimits(local_max=10, max_accumulation=3)),
        ((1, 200), BatchLimits()),
        ((1, 1), BatchLimits(max_batch_size=100)),
        ((1, 16), BatchLimits(max_batch_size=256, local_min=32)),
    ],
    ids=["memory", "more replicas than samples", "below the user's batch", "local_min"],
)
def test_limits_that_leave_nothing_are_refused(placement: tuple[int, int], bounded: BatchLimits) -> None:
    with pytest.raises(InvalidArgument, match=r"no batch of 128 samples or more is within .*; raise local_max"):
        GOODPUT.best(*placement, bounded)
    assert GOODPUT.search([placement[0]], [placement[1]], bounded).goodput.tolist() == [0.0]


def test_other_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"each placement must have 1 ≤ nodes ≤ replicas. Found: 0 on 1"):
        GOODPUT.best(1, 0)
    with pytest.raises(InvalidArgument, match=r"batch must be finite and at least base_batch, 128. Found: 64"):
        GOODPUT.predict(1, 1, 64)
    with pytest.raises(InvalidArgument, match=r"base_batch must be at least 1. Found: 0"):
        Goodput(TYPICAL, NOISE, 0)
    for name, value in itertools.product(("max_batch_size", "local_min", "local_max", "min_gradients"), (0, -1)):
        with pytest.raises(InvalidArgument, match=rf"{name} must be at least 1. Found: {value}"):
            BatchLimits(**{name: value})
    with pytest.raises(InvalidArgument, match=r"local_max must be at least 8. Found: 7"):
        BatchLimits(local_min=8, local_max=7)
    with pytest.raises(InvalidArgument, match=r"max_accumulation must be at least 0. Found: -1"):
        BatchLimits(max_accumulation=-1)
