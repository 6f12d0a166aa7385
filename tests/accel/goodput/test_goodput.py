"""The best batch of a placement: every batch as the oracle, limits, what is refused."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.errors import InvalidArgument
from accel.goodput.efficiency import Bound, NoiseInterval, efficiency
from accel.goodput.goodput import BatchLimits, Speeds, SpeedTable
from accel.goodput.throughput import ThroughputModel
from tests.accel.goodput.goodput_cases import TYPICAL, models, noises, placements

NOISE = NoiseInterval(2000.0, 1200.0, 3500.0)
PURE = NoiseInterval(math.inf, 1200.0, math.inf)
LIMITS = BatchLimits(max_batch_size=100_000)


def best(limits: BatchLimits = LIMITS, *, noise: NoiseInterval = NOISE, bound: Bound = "phi", on: int = 16) -> Speeds:
    return SpeedTable(TYPICAL, 128, limits, [-(-on // 4)], [on]).best(noise, bound)


def batch_of(speeds: Speeds, replicas: int) -> int:
    return int(replicas * speeds.local_batch[0] * (speeds.accumulation[0] + 1))


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


@given(models(), noises(), placements(), st.integers(1, 300), st.sampled_from(["phi", "low", "high"]), st.data())
def test_the_best_is_within_the_limits_and_hardly_worse_than_any_other(
    model: ThroughputModel,
    noise: NoiseInterval,
    placement: tuple[int, int],
    base: int,
    bound: Bound,
    data: st.DataObject,
) -> None:
    allowed, (nodes, replicas) = data.draw(limits(base)), placement
    most = allowed.max_batch_size or base
    table = SpeedTable(model, base, allowed, [nodes], [replicas])
    rate, local, extra = (each.tolist()[0] for each in table.best(noise, bound))

    def goodput(local: int, extra: int) -> float:
        batch = replicas * local * (extra + 1)
        worth = efficiency(batch, base, noise.at(batch, bound))
        return float(batch / base / model.step_s(nodes, replicas, local, extra) * worth)

    if rate:
        assert rate == pytest.approx(goodput(local, extra), rel=1e-9)
        assert base <= replicas * local * (extra + 1) <= most
        assert allowed.local_min <= local <= (allowed.local_max or most) and extra <= allowed.max_accumulation
        assert replicas * (extra + 1) >= allowed.min_gradients or replicas * local * (extra + 1) <= base
    others = [
        goodput(other, 0)
        for other in range(allowed.local_min, (allowed.local_max or most) + 1)
        if base <= replicas * other <= most and (replicas >= allowed.min_gradients or replicas * other <= base)
    ]
    # Batches are compared in steps of a few percent.
    assert rate >= 0.9 * max(others, default=0.0) or len(others) == 1


def test_gradients_are_accumulated_only_for_memory_or_to_measure_the_noise() -> None:
    small = BatchLimits(max_batch_size=8192, local_max=20, max_accumulation=15)
    assert best(small, on=1).accumulation[0] >= 6
    measured = BatchLimits(max_batch_size=8192, max_accumulation=1, min_gradients=2)
    assert [best(measured, noise=PURE, on=replicas).accumulation[0] for replicas in (1, 2)] == [1, 0]
    assert batch_of(best(dataclasses.replace(measured, max_accumulation=0), on=1), 1) == 128


def test_a_lower_noise_scale_chooses_a_smaller_batch_and_pure_noise_the_largest() -> None:
    low, phi, high = (batch_of(best(bound=bound), 16) for bound in ("low", "phi", "high"))
    assert 128 < low < phi < high < 100_000
    assert batch_of(best(noise=PURE), 16) == 100_000
    assert batch_of(best(noise=PURE, bound="low"), 16) == low


def test_where_no_batch_is_within_the_limits_there_is_no_rate() -> None:
    assert best(BatchLimits(max_batch_size=4096, local_max=7)).rate == 0
    assert best(BatchLimits(max_batch_size=4096, local_min=300)).rate == 0


@pytest.mark.parametrize("name", ["max_batch_size", "local_min", "local_max", "max_accumulation", "min_gradients"])
def test_limits_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"{name} must be at least [01]. Found: "):
        BatchLimits(**{name: -1})


@pytest.mark.parametrize("placement", [(0, 0), (2, 1)])
def test_a_placement_has_a_replica_on_each_node(placement: tuple[int, int]) -> None:
    with pytest.raises(InvalidArgument, match="each placement must have 1 ≤ nodes ≤ replicas"):
        SpeedTable(TYPICAL, 128, LIMITS, *([each] for each in placement))
