"""What a step of a larger batch is worth: both published forms, laws, noise at another batch, what is refused."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.errors import InvalidArgument
from accel.goodput.efficiency import NoiseInterval, efficiency
from benchmarks.goodput.iterations import gain, oscillation_share
from tests.accel.goodput.goodput_cases import noises

RELATIVE = 1e-12
batches = st.integers(1, 10**6)
finite = st.floats(0, 1e9)


@given(batches, batches, finite)
def test_efficiency_and_gain_are_the_published_formulas(base: int, more: int, phi: float) -> None:
    batch, exact = base + more, Fraction(phi)
    assert efficiency(batch, base, phi) == pytest.approx(float((exact + base) / (exact + batch)), rel=RELATIVE)
    assert gain(batch, base, phi) == pytest.approx(float((exact / base + 1) / (exact / batch + 1)), rel=RELATIVE)


@given(batches, batches, st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_gain_is_that_of_adascale(base: int, times: int, variance: float, mean_square: float) -> None:
    """AdaScale: (σ² + μ²) / (σ²/S + μ²), σ² the variance of a base batch's gradient, S the scale."""
    phi = base * variance / mean_square
    expected = (variance + mean_square) / (variance / times + mean_square)
    assert gain(base * times, base, phi) == pytest.approx(expected, rel=1e-9)


@given(batches, batches, finite | st.just(math.inf))
def test_efficiency_falls_and_gain_rises_with_the_batch(base: int, more: int, phi: float) -> None:
    assert efficiency(base, base, phi) == gain(base, base, phi) == 1.0
    one, two = efficiency([base + more, base + 2 * more], base, phi)
    assert 0 < two <= one <= 1
    first, second = (gain(base + times * more, base, phi) for times in (1, 2))
    assert 1 - RELATIVE <= first <= second * (1 + RELATIVE)
    assert second <= (base + 2 * more) / base * (1 + RELATIVE)


@given(noises(), batches, batches)
def test_noise_that_grows_with_the_batch_keeps_these_laws(noise: NoiseInterval, base: int, more: int) -> None:
    sizes = np.array([base, base + more, base + 2 * more], float)
    worth = efficiency(sizes, base, noise.at(sizes))
    assert worth[0] == 1
    assert worth[2] <= worth[1] * (1 + RELATIVE) <= 1 + 2 * RELATIVE
    steps = worth * sizes / base
    assert steps[0] <= steps[1] * (1 + RELATIVE) <= steps[2] * (1 + 3 * RELATIVE)
    assert (noise.at(sizes, "low") <= noise.at(sizes)).all()
    assert (noise.at(sizes) <= noise.at(sizes, "high")).all()


def test_ends_of_the_noise_scale() -> None:
    assert efficiency(400, 100, 0.0) == 0.25
    assert gain(400, 100, 0.0) == 1.0
    assert efficiency(400, 100, math.inf) == 1.0
    assert gain(400, 100, math.inf) == 4.0


def test_noise_at_its_own_batch_is_what_was_measured() -> None:
    noise = NoiseInterval(500.0, 400.0, math.inf, batch=64, share=0.9)
    assert [noise.at(64, bound) for bound in ("phi", "low", "high")] == [500.0, 400.0, math.inf]
    assert noise.at(128) == pytest.approx(500 / (0.1 + 0.45))
    assert noise.at(1e12) == pytest.approx(5000)
    assert noise.at(32) < 500
    assert NoiseInterval(500.0, 400.0, 600.0).at(10**6) == 500.0
    assert noise.at(np.array([64, 128])).shape == (2,)


@given(st.floats(1, 1e6), st.integers(1, 1000), st.integers(1, 1000), st.floats(0, 0.99))
def test_a_share_is_found_again(phi: float, batch: int, more: int, share: float) -> None:
    noise = NoiseInterval(phi, phi, phi, batch=batch, share=share)
    larger = batch + more
    assert oscillation_share(phi, batch, noise.at(larger), larger) == pytest.approx(share, abs=1e-9)


def test_a_share_stays_within_its_range() -> None:
    assert oscillation_share(100, 10, 50, 20) == 0.0
    assert oscillation_share(100, 10, 1e9, 20) == oscillation_share(100, 10, math.inf, 20) == 0.999


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((99, 100, 1.0), r"batch must be finite and at least base_batch, 100. Found: 99"),
        ((math.nan, 100, 1.0), r"batch must be finite and at least base_batch, 100. Found: nan"),
        ((100, 0, 1.0), r"base_batch must be positive and finite. Found: 0"),
        ((100, 100, -1.0), r"noise_scale must be at least 0. Found: -1"),
        ((100, 100, math.nan), r"noise_scale must be at least 0. Found: nan"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: tuple[float, float, float], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        efficiency(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 2.0, 3.0), r"must have 0 ≤ low ≤ phi ≤ high. Found: low 2.0, phi 1.0, high 3.0"),
        ((math.nan, 0.0, 3.0), r"must have 0 ≤ low ≤ phi ≤ high. Found: low 0.0, phi nan"),
        ((1.0, -1.0, 3.0), r"must have 0 ≤ low ≤ phi ≤ high"),
        ((1.0, 1.0, 1.0, 0.0), r"batch must be positive and finite, share in \[0, 1\). Found: 0.0 and 0.0"),
        ((1.0, 1.0, 1.0, 1.0, 1.0), r"share in \[0, 1\). Found: 1.0 and 1.0"),
    ],
)
def test_a_noise_interval_must_be_one(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        NoiseInterval(*arguments)
