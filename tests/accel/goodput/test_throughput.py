"""The step-time model: its formula in decimal arithmetic, its laws, what it refuses."""

from __future__ import annotations

import dataclasses
import math
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.errors import InvalidArgument
from accel.goodput.throughput import ThroughputModel
from tests.accel.goodput.goodput_cases import TYPICAL, models, placements, times

batches = st.integers(1, 10**5)
RELATIVE = 1e-9


def exact_step_s(model: ThroughputModel, nodes: int, replicas: int, batch: int, extra: int, scale: float) -> float:
    """The formulas of the module's docstring with 30 digits."""

    def total(x: Decimal, y: Decimal, p: float) -> Decimal:
        power = Decimal(p)
        return (x**power + y**power) ** (1 / power) if x or y else Decimal(0)

    with localcontext() as context:
        context.prec, context.Emin, context.Emax = 30, -(10**6), 10**6
        value = {field.name: Decimal(getattr(model, field.name)) for field in dataclasses.fields(model)}
        n, k = Decimal(nodes), Decimal(replicas)
        log2 = Decimal(2).ln()
        sync = (1 - 1 / k) * value["local_ring_s"] + k.ln() / log2 * value["local_latency_s"]
        if nodes > 1:
            ring = value["ring_s"] + (value["two_nodes_s"] if nodes == 2 else 0)
            sync += (1 - 1 / k) * ring + (1 - n / k) * value["shared_link_s"] + n.ln() / log2 * value["latency_s"]
        compute = total(value["compute_fixed_s"], value["compute_sample_s"] * batch, model.compute_exponent)
        return float(extra * compute + total(compute, Decimal(scale) * sync, model.overlap_exponent))


@given(models(), placements(), batches, st.integers(0, 20), st.sampled_from([0.0, 0.25, 1.0, 3.0]))
def test_step_time_is_the_formula(
    model: ThroughputModel, placement: tuple[int, int], batch: int, extra: int, scale: float
) -> None:
    expected = exact_step_s(model, *placement, batch, extra, scale)
    assert model.step_s(*placement, batch, extra, scale) == pytest.approx(expected, rel=RELATIVE)


@given(models(), batches, st.integers(0, 20))
def test_one_replica_never_waits_for_another(model: ThroughputModel, batch: int, extra: int) -> None:
    assert model.step_s(1, 1, batch, extra) == pytest.approx((extra + 1) * model.step_s(1, 1, batch), rel=RELATIVE)


@given(models(), placements(), batches)
def test_throughput_rises_with_the_local_batch_and_less_and_less(
    model: ThroughputModel, placement: tuple[int, int], batch: int
) -> None:
    local = np.array([1.0, 2.0, 4.0]) * batch
    one, two, four = local / model.step_s(*placement, local)
    assert one <= two * (1 + RELATIVE)
    assert two <= four * (1 + RELATIVE)
    assert four / two <= two / one * (1 + RELATIVE)


@given(models(), placements(), st.integers(1, 64), batches)
def test_throughput_of_a_replica_never_rises_with_their_number(
    model: ThroughputModel, placement: tuple[int, int], more: int, batch: int
) -> None:
    nodes, replicas = placement
    few, many = (batch / model.step_s(nodes, count, batch) for count in (replicas, replicas + more))
    assert 0 <= many <= few * (1 + RELATIVE)


@given(models(), st.integers(2, 16), st.integers(16, 64), batches)
def test_several_nodes_are_never_faster_than_one(model: ThroughputModel, nodes: int, replicas: int, batch: int) -> None:
    assert model.step_s(1, replicas, batch) <= model.step_s(nodes, replicas, batch) * (1 + RELATIVE)


@given(models(), placements(), batches, st.integers(1, 15))
def test_accumulation_takes_no_less_time_than_the_same_samples_at_once(
    model: ThroughputModel, placement: tuple[int, int], batch: int, extra: int
) -> None:
    at_once = model.step_s(*placement, batch * (extra + 1))
    assert at_once <= model.step_s(*placement, batch, extra) * (1 + RELATIVE)


@given(models(), placements(), batches, st.floats(0, 10), st.floats(0, 10))
def test_less_communication_takes_no_more_time(
    model: ThroughputModel, placement: tuple[int, int], batch: int, one: float, other: float
) -> None:
    few, many = sorted((one, other))
    assert model.step_s(*placement, batch, 0, few) <= model.step_s(*placement, batch, 0, many) * (1 + RELATIVE)
    assert model.step_s(*placement, batch, 0, 0.0) == pytest.approx(model.step_s(1, 1, batch), rel=RELATIVE)


@given(times, st.integers(1, 10))
def test_times_scale(seconds: float, exponent: int) -> None:
    small = dataclasses.replace(TYPICAL, compute_exponent=exponent)
    scaled = {
        field.name: getattr(small, field.name) * (seconds if field.name.endswith("_s") else 1)
        for field in dataclasses.fields(small)
    }
    expected = seconds * small.step_s(2, 8, 64, 1)
    assert ThroughputModel(**scaled).step_s(2, 8, 64, 1) == pytest.approx(expected, rel=RELATIVE)


def test_numbers_give_numbers_and_arrays_give_arrays() -> None:
    nodes, replicas = np.array([1, 2, 4]), np.array([[1], [4]]) * np.array([1, 2, 4])
    table = TYPICAL.step_s(nodes, replicas, 32)
    assert table.shape == (2, 3)
    assert table[1, 2] == TYPICAL.step_s(4, 16, 32)
    assert type(TYPICAL.step_s(1, 1, 8)) is float
    assert TYPICAL.step_s([], [], []).shape == (0,)


@pytest.mark.parametrize("tiny", [1e-9, 1e-300])
def test_tiny_times_do_not_vanish(tiny: float) -> None:
    model = ThroughputModel(compute_fixed_s=tiny, compute_sample_s=tiny, compute_exponent=10, overlap_exponent=10)
    assert model.step_s(1, 1, 1) == pytest.approx(tiny * 2**0.1, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodes": 0}, r"nodes must be at least 1 and finite. Found: 0"),
        ({"replicas": math.nan}, r"replicas must be at least 1 and finite. Found: nan"),
        ({"nodes": 3, "replicas": 2}, r"replicas must be at least nodes, one on each. Found: 2 on 3"),
        ({"local_batch": 0}, r"local_batch must be above 0 and finite. Found: 0"),
        ({"local_batch": [8, math.inf]}, r"local_batch must be above 0 and finite. Found: inf"),
        ({"accumulation": -1}, r"accumulation must be at least 0 and finite. Found: -1"),
        ({"communication_scale": -0.5}, r"communication_scale must be at least 0 and finite. Found: -0.5"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        TYPICAL.step_s(**{"nodes": 1, "replicas": 4, "local_batch": 8, **arguments})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"compute_fixed_s": -1.0}, r"compute_fixed_s must be in \[0, inf\] and finite. Found: -1.0"),
        ({"ring_s": math.inf}, r"ring_s must be in \[0, inf\] and finite. Found: inf"),
        ({"latency_s": math.nan}, r"latency_s must be in \[0, inf\] and finite. Found: nan"),
        ({"overlap_exponent": 0.5}, r"overlap_exponent must be in \[1, 10\] and finite. Found: 0.5"),
        ({"compute_exponent": 11}, r"compute_exponent must be in \[1, 10\] and finite. Found: 11"),
        ({"compute_fixed_s": 0, "compute_sample_s": 0}, r"must not both be 0: a step takes time"),
    ],
)
def test_parameters_out_of_range_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ThroughputModel(**{"compute_fixed_s": 0.1, "compute_sample_s": 0.1, **parameters})
