"""The interleaved experiment and its interval."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.profiler.trial import Trial, TrialConfig, interval, student_cdf, student_quantile


def run(gain: float, noise: float, seed: int = 0, config: TrialConfig | None = None) -> Trial:
    chance = random.Random(seed)
    trial = Trial(config or TrialConfig())
    while trial.verdict is None:
        base = 0.02 if trial.arm == "A" else 0.02 / gain
        trial.record([base * math.exp(chance.gauss(0, noise)) for _ in range(trial.config.block_steps)])
    return trial


def test_blocks_run_in_the_order_abba() -> None:
    trial = Trial(TrialConfig(looks=(4,)))
    order = ""
    while trial.verdict is None:
        order += trial.arm
        trial.record([0.01] * 4)

    assert order == "ABBAAB"  # equal arms: a drop after the third pair


def test_a_clear_gain_is_kept_at_the_first_look() -> None:
    outcome = run(1.5, 0.03).outcome()

    assert (outcome.verdict, outcome.pairs) == ("keep", 6)
    assert outcome.low < outcome.gain < outcome.high
    assert outcome.gain == pytest.approx(1.5, rel=0.03)
    assert outcome.before_ms == pytest.approx(20, rel=0.03)
    assert outcome.after_ms == pytest.approx(20 / 1.5, rel=0.03)


def test_single_stalls_do_not_move_the_verdict() -> None:
    trial = Trial()
    while trial.verdict is None:
        base = 0.02 if trial.arm == "A" else 0.015
        trial.record([base, base * 1.01, base * 0.99, 1.0])  # every block has a stall of a second

    assert trial.outcome().gain == pytest.approx(20 / 15, rel=0.01)


def test_bursts_of_another_process_seldom_cost_a_gain() -> None:
    def kept(seed: int) -> bool:
        chance, trial = random.Random(seed), Trial()
        for _ in range(2 * trial.config.looks[-1]):
            base = 0.02 if trial.arm == "A" else 0.02 / 1.3
            bursts = [3.0 if chance.random() < 0.3 else 1.0 for _ in range(5)]
            trial.record([base * burst * math.exp(chance.gauss(0, 0.05)) for burst in bursts])
            if trial.verdict is not None:
                return trial.verdict == "keep"
        raise AssertionError("the trial went on after its last look")

    assert sum(map(kept, range(100))) >= 80  # 35 if each pair counted in full


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    chance = random.Random(7)
    covered = 0
    for _ in range(2000):
        low, high = interval([chance.gauss(0.1, 0.3) for _ in range(8)], 0.025)
        covered += low < 0.1 < high

    assert 0.93 < covered / 2000 < 0.97


def test_a_decided_trial_takes_no_more_blocks() -> None:
    trial = run(1.5, 0.01)
    with pytest.raises(RuntimeError, match="the trial is decided"):
        trial.record([0.01])


def test_an_open_trial_has_no_outcome() -> None:
    with pytest.raises(RuntimeError, match="no verdict yet"):
        Trial().outcome()


@pytest.mark.parametrize("times", [[], [0.0, 0.1], [-1.0]])
def test_step_times_must_be_positive(times: list[float]) -> None:
    with pytest.raises(ValueError, match="a block needs positive step times"):
        Trial().record(times)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"block_steps": 0}, "block_steps must be at least 1, got 0"),
        ({"looks": ()}, "looks must be increasing"),
        ({"looks": (4, 4)}, "looks must be increasing"),
        ({"more_looks": (36,)}, "looks must be increasing"),
        ({"alpha": 0.0}, r"must lie in \(0, 0.5\)"),
        ({"min_pairs": 1}, "min_pairs must be at least 2, got 1"),
    ],
)
def test_config_names_what_is_wrong(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TrialConfig(**options)  # type: ignore[arg-type]


def test_an_interval_needs_two_pairs() -> None:
    with pytest.raises(ValueError, match="at least 2 pairs, got 1"):
        interval([0.1], 0.05)


# Quantiles of Student's t from a printed table (Abramowitz & Stegun, table 26.10).
@pytest.mark.parametrize(
    ("p", "degrees", "t"),
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.95, 5, 2.015),
        (0.995, 10, 3.169),
        (0.9995, 5, 6.869),
        (0.975, 120, 1.980),
    ],
)
def test_quantiles_agree_with_the_table(p: float, degrees: int, t: float) -> None:
    assert student_quantile(p, degrees) == pytest.approx(t, abs=6e-4)


@given(st.floats(-50, 50), st.integers(1, 60))
def test_the_distribution_is_symmetric_and_bounded(t: float, degrees: int) -> None:
    p = student_cdf(t, degrees)

    assert 0 <= p <= 1
    assert p + student_cdf(-t, degrees) == pytest.approx(1, abs=1e-12)


@given(st.floats(0.5, 0.9999), st.integers(1, 60))
def test_quantile_inverts_the_distribution(p: float, degrees: int) -> None:
    assert student_cdf(student_quantile(p, degrees), degrees) == pytest.approx(p, abs=1e-8)


def test_a_device_that_runs_ahead_is_judged_by_means() -> None:
    trial = Trial(reduce=statistics.fmean)
    while trial.verdict is None:  # launches return at once, the last step of a block waits for all of them
        total = 0.08 if trial.arm == "A" else 0.04
        trial.record([0.001, 0.001, 0.001, total - 0.003])

    assert trial.outcome().gain == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("step_s", "more"),
    [(0.3, ()), (0.09, ()), (0.06, ()), (0.03, (72,)), (0.012, (72, 144)), (0.001, (72, 144, 288)), (0.0, ())],
)
def test_fast_steps_have_as_much_time_as_slow_ones(step_s: float, more: tuple[int, ...]) -> None:
    config = TrialConfig()
    assert config.for_steps_of(step_s).more_looks == more
    assert config.at_length().for_steps_of(step_s).more_looks == more
    brief = config.brief()
    assert brief is not None
    assert brief.for_steps_of(step_s).more_looks == ()


FAST = TrialConfig().for_steps_of(0.001)


def test_a_longer_trial_keeps_a_small_gain_that_a_short_one_leaves_open() -> None:
    def kept(config: TrialConfig) -> int:
        return sum(run(1.06, 0.15, seed, config).verdict == "keep" for seed in range(20))

    assert kept(TrialConfig()) <= 8
    assert kept(FAST) >= 14


def test_a_longer_trial_ends_where_nothing_looks_faster() -> None:
    """Its steps would cost something then."""
    pairs = [run(0.97, 0.4, seed, FAST).outcome().pairs for seed in range(40)]
    assert statistics.fmean(pairs) < 50


def test_a_longer_trial_seldom_keeps_what_gives_nothing() -> None:
    kept = sum(run(1.0 + FAST.keep_gain, 0.1, seed, FAST).verdict == "keep" for seed in range(150))
    assert kept <= 2  # nominal: a third of one


def test_a_large_gain_may_show_after_four_pairs() -> None:
    config = TrialConfig().early()
    assert config.looks == (4, *TrialConfig().looks)
    assert config.early() == config


def test_a_trial_may_begin_with_either_arm() -> None:
    order = {}
    for first in ("A", "B"):
        trial, order[first] = Trial(TrialConfig(first=first)), ""
        while trial.verdict is None:
            order[first] += trial.arm
            trial.record([0.02] if trial.arm == "A" else [0.01])
        assert trial.outcome().gain == pytest.approx(2.0)
    assert order["A"][:8] == "ABBAABBA" and order["B"][:8] == "BAABBAAB"
    with pytest.raises(ValueError, match="first must be one of"):
        TrialConfig(first="C")  # type: ignore[arg-type]
