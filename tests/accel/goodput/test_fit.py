"""The fit: that it finds what made the data, and what it says of the unobserved."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.errors import InvalidArgument
from accel.goodput.fit import Problem, fit_throughput, theta_of
from accel.goodput.observations import Configuration, Observations, StepTimes
from accel.goodput.throughput import SYNC_TERMS, ThroughputModel
from tests.accel.goodput.goodput_cases import TYPICAL
from tests.sampling import examples

GRID = [
    Configuration(nodes, nodes * each, batch, extra)
    for nodes, each, batch, extra in itertools.product((1, 2, 3, 4), (1, 2, 4), (8, 32, 128), (0, 2))
]


def made_by(
    model: ThroughputModel, configurations: Iterable[Configuration], noise: float = 0.0, seed: int = 0
) -> StepTimes:
    """Return step times of a model, with normal noise on their logarithms."""
    listed = list(configurations)
    draw = np.random.default_rng(seed)
    return StepTimes.of(listed, [model.step_s(*each) * np.exp(draw.normal(0, noise)) for each in listed])


def drawn_model(seed: int) -> ThroughputModel:
    """Return a model whose parts all matter: compute 20 to 200 ms, sync of the same size."""
    draw = np.random.default_rng(seed)
    unit = 10 ** draw.uniform(-1.7, -0.7)
    return ThroughputModel(
        compute_fixed_s=unit * draw.uniform(0.2, 1),
        compute_sample_s=unit * draw.uniform(0.2, 1) / 32,
        compute_exponent=draw.uniform(1.1, 6),
        overlap_exponent=draw.uniform(1.1, 6),
        **{name: unit * draw.uniform(0.05, 1) for name in SYNC_TERMS},
    )


def root_mean_square(times: StepTimes, model: ThroughputModel) -> float:
    log = np.log(
        model.step_s(times.nodes, times.replicas, times.local_batch, times.accumulation, times.communication_scale)
    )
    return float(np.sqrt(np.mean((log - np.log(times.seconds)) ** 2)))


def test_prediction_is_that_of_the_model() -> None:
    times = made_by(TYPICAL, [*GRID, Configuration(2, 8, 64, 1, 0.0), Configuration(2, 8, 64, 1, 0.5)])
    log = Problem(times).predict(theta_of(TYPICAL))
    np.testing.assert_allclose(np.exp(log), times.seconds, rtol=1e-12)


@pytest.mark.sample(2, every_value=False)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most_extra", [0, 10])
def test_the_loss_is_within_a_tenth_of_that_of_what_made_1000_noisy_points(seed: int, most_extra: int) -> None:
    true, draw = drawn_model(seed), np.random.default_rng(seed)
    points = []
    for _ in range(1000):
        nodes = int(draw.integers(1, 11))
        replicas = int(draw.integers(nodes, 101))
        points.append(
            Configuration(nodes, replicas, int(draw.integers(16, 129)), int(draw.integers(0, most_extra + 1)))
        )
    times = made_by(true, points, noise=0.1, seed=seed)
    fitted = fit_throughput(times)
    assert root_mean_square(times, fitted) <= 1.1 * root_mean_square(times, true)
    problem = Problem(times)
    assert problem.loss(theta_of(fitted)) <= 1.01 * problem.loss(theta_of(true))


@pytest.mark.parametrize("seed", range(4))
def test_what_made_the_data_is_predicted_beyond_it(seed: int) -> None:
    """At twice and four times the largest batch, and at twice the nodes."""
    true = drawn_model(seed)
    fitted = fit_throughput(made_by(true, GRID))
    for beyond in (Configuration(4, 16, 256), Configuration(3, 12, 512, 5), Configuration(8, 32, 64)):
        assert fitted.step_s(*beyond) == pytest.approx(true.step_s(*beyond), rel=0.2)


def test_a_tenth_of_wild_step_times_hardly_moves_the_fit() -> None:
    times = made_by(TYPICAL, GRID, noise=0.02)
    wild = times.seconds.copy()
    wild[::10] *= 30
    fitted = fit_throughput(dataclasses.replace(times, seconds=wild))
    assert root_mean_square(times, fitted) < 0.06


def test_an_unsure_step_time_counts_less() -> None:
    twice = [Configuration(1, 1, 32), Configuration(1, 1, 32)]
    times = StepTimes.of(twice, [0.1, 0.12])
    sure = dataclasses.replace(times, deviation=np.array([0.01, 0.1]))
    assert fit_throughput(sure).step_s(1, 1, 32) == pytest.approx(0.1, rel=0.01)


def test_a_start_leads_to_the_same_loss() -> None:
    times = made_by(TYPICAL, GRID, noise=0.05)
    problem = Problem(times)
    cold = problem.loss(theta_of(fit_throughput(times)))
    starts = [
        fit_throughput(made_by(TYPICAL, GRID[:20])),
        # Without a logarithm, far off, and with exponents that have no logit.
        ThroughputModel(compute_fixed_s=0.0, compute_sample_s=1e9),
        ThroughputModel(compute_fixed_s=1.0, compute_sample_s=0.0, compute_exponent=10, overlap_exponent=10),
    ]
    for start in starts:
        assert problem.loss(theta_of(fit_throughput(times, start))) <= 1.02 * cold


def test_without_scipy_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(InvalidArgument, match=r"scipy, which is not installed; pip install 'accel-train\[elastic\]'"):
        fit_throughput(made_by(TYPICAL, GRID))


# What was never observed


@settings(max_examples=examples(60))
@given(st.floats(1e-4, 1e2), st.integers(1, 10**5))
def test_one_observation_is_met_and_promises_no_wonder(seconds: float, batch: int) -> None:
    observations = Observations()
    observations.add(Configuration(1, 1, batch), seconds)
    model = fit_throughput(observations.step_times())
    assert model.step_s(1, 1, batch) == pytest.approx(seconds, rel=0.01)

    def throughput(nodes: int, replicas: int, local: int) -> float:
        return replicas * local / float(model.step_s(nodes, replicas, local))

    # Larger batches: an eighth faster at twice the batch, not twice as fast.
    assert 1.0 < throughput(1, 1, 2 * batch) / throughput(1, 1, batch) < 1.2
    assert 1.0 < throughput(1, 1, 100 * batch) / throughput(1, 1, batch) < 1.3
    # More replicas: worth a try, but less than as many times as fast.
    speedups = {
        placement: throughput(*placement, batch) / throughput(1, 1, batch)
        for placement in ((1, 2), (1, 8), (2, 2), (16, 128))
    }
    assert 1.5 < speedups[1, 2] <= 2
    assert 4 < speedups[1, 8] < 8
    assert 1.5 < speedups[2, 2] < speedups[1, 2]
    assert 64 < speedups[16, 128] < 127


observed = st.tuples(
    st.integers(1, 4), st.integers(1, 8), st.integers(1, 10**6), st.integers(0, 9), st.sampled_from([0.0, 0.3, 1.0])
)


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(observed, st.floats(1e-9, 1e6)), min_size=1, max_size=12))
def test_whatever_was_observed_has_a_model(steps: list[tuple[tuple[int, int, int, int, float], float]]) -> None:
    """Even step times that contradict each other."""
    observations = Observations()
    for (nodes, each, batch, extra, scale), seconds in steps:
        observations.add(Configuration(nodes, nodes * each, batch, extra, scale), seconds)
    step_s = fit_throughput(observations.step_times()).step_s([1, 1, 2, 16], [1, 4, 2, 128], 32)
    assert np.isfinite(step_s).all()
    assert (step_s > 0).all()


def test_several_nodes_are_slower_than_one_before_they_are_seen() -> None:
    local = [Configuration(1, replicas, 32) for replicas in (1, 2, 4)]
    model = fit_throughput(made_by(TYPICAL, local))
    for nodes in (2, 3, 4):
        assert model.step_s(nodes, 4, 32) > 1.01 * model.step_s(1, 4, 32)


def test_replicas_without_a_single_one_share_their_time_out() -> None:
    model = fit_throughput(made_by(TYPICAL, [Configuration(2, 8, 32)]))
    seconds = TYPICAL.step_s(2, 8, 32)
    assert model.step_s(2, 8, 32) == pytest.approx(seconds, rel=0.02)
    assert 0.3 * seconds < model.step_s(1, 1, 32) < seconds


def test_nothing_observed_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"there must be at least one step time to fit a model to. Found: none"):
        fit_throughput(Observations().step_times())


@pytest.mark.parametrize("scale", [1e-9, 1e6])
def test_units_do_not_matter(scale: float) -> None:
    times = made_by(TYPICAL, GRID, noise=0.05)
    scaled = fit_throughput(dataclasses.replace(times, seconds=times.seconds * scale))
    assert scaled.step_s(4, 16, 64) == pytest.approx(scale * fit_throughput(times).step_s(4, 16, 64), rel=1e-6)
