"""The statistics: unbiased sums, averages that forget, an interval that covers, nothing certain in pure noise."""

from __future__ import annotations

import doctest
import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.errors import InvalidArgument
from accel.goodput import noise_scale
from accel.goodput.noise_scale import NoiseScale, NoiseSums
from tests.accel.goodput.noise_loops import averaged, sums_of_parts


def steps_of(
    mu_square: float, dimensions: int, batch: int, parts: int, count: int, seed: int
) -> tuple[float, list[NoiseSums]]:
    """Return tr(Σ), and the sums of steps whose gradients are normal with variances from 0.04 to 4."""
    random = np.random.default_rng(seed)
    mu = np.zeros(dimensions)
    mu[0] = math.sqrt(mu_square)
    deviations = np.linspace(0.2, 2, dimensions)
    noise = random.standard_normal((count, parts, dimensions)) * deviations / math.sqrt(batch / parts)
    gradients = mu + noise
    squares = (gradients**2).sum(2).mean(1)
    means = (gradients.mean(1) ** 2).sum(1)
    sums = [NoiseSums(float(s), float(m), batch / parts, batch) for s, m in zip(squares, means, strict=True)]
    return float((deviations**2).sum()), sums


def after(sums: list[NoiseSums]) -> NoiseScale:
    noise = NoiseScale()
    for each in sums:
        noise.update(each, samples=30 * each.samples)  # every 30th step is measured
    return noise


def test_module_examples_run() -> None:
    assert doctest.testmod(noise_scale).failed == 0


# One step's sums


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    equal=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_unequal_parts_are_unbiased(sizes: list[int], equal: bool, seed: int) -> None:
    """In expectation over the samples: E‖S_k‖² = ‖μ‖² + tr/b_k and E‖G‖² = ‖μ‖² + tr Σ w²/b_k, put in exactly."""
    random = np.random.default_rng(seed)
    mu_square, trace = random.uniform(0.1, 10, 2)
    weights = np.full(len(sizes), 1 / len(sizes)) if equal else np.array(sizes) / sum(sizes)
    squares = mu_square + trace / np.array(sizes)
    mean_square = mu_square + trace * float((weights**2 / np.array(sizes)).sum())
    sums = sums_of_parts(squares.tolist(), mean_square, sizes, weights.tolist() if equal else None)
    assert sums.variance == pytest.approx(trace, rel=1e-9)
    assert sums.squared_norm == pytest.approx(mu_square, rel=1e-6, abs=1e-9)
    if not equal:
        assert sums.samples == pytest.approx(sum(sizes))


def test_equal_parts_are_the_papers_formula() -> None:
    c, b, mean_of_squares, square = 4, 8, 7.0, 2.5
    sums = sums_of_parts([7.0] * c, square, [b] * c)
    assert sums.squared_norm == pytest.approx((c * square - mean_of_squares) / (c - 1))
    assert sums.variance == pytest.approx(b * c / (c - 1) * (mean_of_squares - square))


# Averages


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_phi_is_within_ten_percent_of_the_truth(parts: int) -> None:
    trace, sums = steps_of(2.0, 50, 64, parts, 400, seed=parts)
    noise = averaged(sums)
    assert noise.variance == pytest.approx(trace, rel=0.05)
    assert noise.squared_norm == pytest.approx(2.0, rel=0.1)
    assert noise.phi == pytest.approx(trace / 2.0, rel=0.1)


def test_before_the_first_measurement_nothing_is_known() -> None:
    estimate = NoiseScale().estimate()
    assert math.isnan(estimate.phi)
    assert (estimate.low, estimate.high, estimate.measurements) == (0.0, math.inf, 0.0)


def test_a_few_late_measurements_are_not_outweighed_by_many_of_the_beginning() -> None:
    noise, batch = NoiseScale(), 16
    at = [*range(10, 60, 4), *range(800, 5600, 800)]  # 13, and then 6
    for before, step in itertools.pairwise([0, *at]):
        squared_norm, trace = 1000.0 / step**1.5, 100.0 / step**0.5  # φ is a tenth of the step
        sums = NoiseSums(squared_norm + trace / 4, squared_norm + trace / batch, 4, batch)
        noise.update(sums, (step - before) * batch)
    assert noise.phi == pytest.approx(4800 / 10, rel=0.7)


@pytest.mark.parametrize("apart", [1, 30])
def test_phi_follows_gradients_that_shrink_by_orders_of_magnitude(apart: int) -> None:
    """With weights that decay the first steps outweighed hundreds of later ones."""
    noise, batch = NoiseScale(), 16
    for step in range(10, 2000, apart):
        squared_norm, trace = 1000.0 / step**1.5, 100.0 / step**0.5  # φ is a tenth of the step
        noise.update(
            NoiseSums(squared_norm + 2 * trace / batch, squared_norm + trace / batch, batch / 2, batch), batch * apart
        )
        if step > 14 * apart * 2:
            assert 0.5 * step / 10 < noise.phi < step / 10


def test_estimate_is_continuous_when_the_batch_changes() -> None:
    """tr(Σ) and ‖μ‖² don't depend on the batch, so larger batches go on where smaller ones ended."""
    trace, small = steps_of(2.0, 50, 32, 2, 150, seed=3)
    _, large = steps_of(2.0, 50, 256, 2, 150, seed=2)
    noise = after(small)
    first = noise.estimate()
    for each in large:
        noise.update(each, samples=30 * each.samples)
    second = noise.estimate()
    assert first.low < trace / 2 < first.high
    assert second.low < trace / 2 < second.high
    assert second.high - second.low < first.high - first.low


# The interval


@pytest.mark.parametrize(
    ("mu_square", "dimensions", "batch", "parts", "count"),
    [(1.0, 10, 16, 2, 40), (5.0, 200, 16, 4, 50), (1.0, 200, 64, 2, 60), (1.0, 10, 4, 2, 100)],
)
def test_interval_covers_the_truth_as_often_as_it_says(
    mu_square: float, dimensions: int, batch: int, parts: int, count: int
) -> None:
    seeds, covered = 100, 0
    for seed in range(seeds):
        trace, sums = steps_of(mu_square, dimensions, batch, parts, count, seed)
        estimate = after(sums).estimate()
        assert estimate.low <= estimate.phi <= estimate.high
        covered += estimate.low <= trace / mu_square <= estimate.high
    # 0.95 is nominal; three standard deviations of 100 draws are 0.065.
    assert covered / seeds >= 0.88


def test_higher_confidence_has_the_wider_interval() -> None:
    _, sums = steps_of(1.0, 10, 16, 2, 60, seed=0)
    lows, highs = [], []
    for confidence in (0.5, 0.9, 0.99, 0.99999):
        noise = averaged(sums, confidence)
        lows.append(noise.estimate().low)
        highs.append(noise.estimate().high)
    assert lows == sorted(lows, reverse=True)
    assert highs == sorted(highs)


def test_interval_at_a_confidence_beyond_the_test_for_zero() -> None:
    """‖μ‖² differs from 0 at the level 0.001, but not at 1e-9: unbounded above, and still bounded below."""
    wobbles = [2.4 if step % 2 else -1.4 for step in range(60)]
    noise = averaged([NoiseSums(0.5 + each + 4.0, 0.5 + each + 2.0, 8, 16) for each in wobbles], 1 - 1e-9)
    low, high = noise.estimate()[1:3]
    assert 0 < low < noise.phi
    assert high == math.inf


@pytest.mark.parametrize("dimensions", [10, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 500))])
def test_pure_noise_is_never_certain_of_a_large_phi(dimensions: int) -> None:
    """Of runs with 150 looks, few see a lower end above 0 at any of them; AdaptDL's clamp went from 16 to 512 here."""
    runs, wrong = 60, 0
    for seed in range(runs):
        _, sums = steps_of(0.0, dimensions, 16, 2, 150, seed)
        noise = NoiseScale()
        lows = []
        for each in sums:
            noise.update(each, samples=30 * each.samples)
            estimate = noise.estimate()
            lows.append(estimate.low)
            assert estimate.low == 0 or estimate.high > estimate.low
        wrong += max(lows) > 0
        assert noise.estimate().high == math.inf or max(lows) > 0
    assert wrong <= 0.1 * runs


# Bad values


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e200])
@pytest.mark.parametrize("place", ["part_square", "mean_square"])
def test_what_is_not_finite_is_skipped(value: float, place: str) -> None:
    noise = NoiseScale()
    good = NoiseSums(5.0, 3.0, 8, 16)
    noise.update(good)
    assert not noise.update(good._replace(**{place: value}))
    assert (noise.measured, noise.skipped) == (1, 1)
    assert noise.phi == 32.0


@pytest.mark.parametrize(("part", "whole"), [(16, 16), (0, 16), (32, 16), (math.nan, 16), (8, math.inf)])
def test_samples_that_are_no_parts_are_refused(part: float, whole: float) -> None:
    with pytest.raises(InvalidArgument, match="0 < part_samples < samples must hold"):
        NoiseScale().update(NoiseSums(5.0, 3.0, part, whole))


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0])
def test_confidence_must_be_a_probability(confidence: float) -> None:
    with pytest.raises(InvalidArgument, match=r"between 0 and 1, such as 0\.95"):
        NoiseScale(confidence=confidence)


# The state


def test_state_goes_through_json_and_the_run_goes_on_alike() -> None:
    _, sums = steps_of(1.0, 10, 16, 2, 80, seed=0)
    whole, first, second = NoiseScale(), NoiseScale(), NoiseScale()
    for each in sums:
        whole.update(each)
    for each in sums[:40]:
        first.update(each)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for each in sums[40:]:
        second.update(each)
    assert second.estimate() == whole.estimate()
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize("count", [8, 12, 24, 48])
@pytest.mark.parametrize("deviation", [2.0, 4.0, 8.0])
def test_a_signal_that_is_hidden_makes_no_noise_scale_of_any_size(count: int, deviation: float) -> None:
    """‖μ‖² of 1 among measurements that deviate by `deviation`, in a job that learns: φ is 300.

    One lower end in thirty was above 1,200, up to 1e5, and the batch went to its largest.
    """
    lows = []
    for seed in range(200):
        random, noise = np.random.default_rng(seed), NoiseScale(confidence=0.3)
        for _ in range(count):
            x, y = random.normal(1.0, deviation), random.normal(300.0, 60.0)
            noise.update(NoiseSums(x + y / 16, x + y / 64, 16, 64))
        lows.append(noise.estimate(learns=True).low)
    assert max(lows) < 1500
    assert sum(low > 600 for low in lows) <= 10  # the ends are those of 65 %
    assert min(lows) > 0


STATE: dict[str, object] = {
    "measured": 1,
    "skipped": 0,
    "samples": 8.0,
    "kept": [],
    "signal": {},
}


@pytest.mark.parametrize(
    "state",
    [
        {},
        {**STATE, "averages": {"mean": 1.0}, "kept": None},
        {**STATE, "kept": [[8.0, 1.0]]},
        {**STATE, "kept": [[8.0, math.nan, 1.0, 8.0]]},
        {**STATE, "samples": math.inf},
        {**STATE, "signal": {"mean": math.nan}},
        {**STATE, "signal": {"median": 1.0}},
    ],
)
def test_another_state_is_refused_and_nothing_changes(state: dict[str, object]) -> None:
    noise = NoiseScale()
    noise.update(NoiseSums(5.0, 3.0, 8, 16))
    with pytest.raises(InvalidArgument, match="state of a noise scale"):
        noise.load_state_dict(state)
    assert noise.phi == 32.0


def test_reset_forgets_the_measurements() -> None:
    noise = NoiseScale()
    noise.update(NoiseSums(5.0, 3.0, 8, 16))
    noise.reset()
    assert math.isnan(noise.phi)
    noise.update(NoiseSums(9.0, 8.0, 8, 16))
    assert noise.phi == pytest.approx(16 / 7)
