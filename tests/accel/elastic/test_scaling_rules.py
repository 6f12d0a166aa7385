"""Learning-rate rules: published factors, their bounds, and which optimizer gets which."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accel.elastic.scaling_rules import (
    LEGW,
    AdaScale,
    BatchScale,
    Linear,
    Multipliers,
    NoScaling,
    Rule,
    ScalingRule,
    Sqrt,
    rule_for,
)
from accel.errors import InvalidArgument
from accel.optim import FusedAdam, FusedAdamW, FusedLAMB, FusedLARS, FusedSGD

SCALES = st.floats(1, 1e6)
NOISES = st.none() | st.floats(0, math.inf)
GAINS = st.none() | st.floats(0, 1e9)
RULES: list[ScalingRule] = [AdaScale(), Linear(), Sqrt(), Sqrt(moments=False), Sqrt(capped=False), NoScaling()]


# The batch


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((64, 128), "batch_size must be at least base_batch_size, which is 128, got 64"),
        ((math.inf, 128), "batch_size must be at least base_batch_size"),
        ((math.nan, 128), "batch_size must be at least base_batch_size"),
        ((128, 0), "base_batch_size must be positive, got 0"),
        ((128, 128, -1.0), "noise must be at least 0, or None, got -1.0"),
        ((128, 128, math.nan), "noise must be at least 0, or None, got nan"),
        ((128, 128, 1.0, (3.0, 2.0)), "noise_bounds must be two numbers in order"),
        ((128, 128, 1.0, None, math.nan), "gain must be at least 0"),
        ((128, 128, 1.0, None, None, -1.0), "epoch must be at least 0"),
    ],
)
def test_batch_refuses_numbers_out_of_range(arguments: tuple[float, ...], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text.replace("(", r"\(")):
        BatchScale(*arguments)  # type: ignore[arg-type]


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.floats(1, 1e3), st.integers(1, 512))
def test_gain_from_the_noise_scale_is_that_of_the_paper(variance: float, mean: float, scale: float, base: int) -> None:
    expected = (variance + mean) / (variance / scale + mean)  # σ² and μ² of a batch of M0
    batch = BatchScale(scale * base, base, noise=base * variance / mean)
    assert batch.bounded_gain == pytest.approx(min(expected, scale), rel=1e-9)


def test_gain_is_scale_where_there_is_nothing_but_noise() -> None:
    assert BatchScale(1024, 128, noise=math.inf).bounded_gain == 8
    assert BatchScale(1024, 128, noise=0.0).bounded_gain == 1


def test_lower_bound_of_the_noise_caps() -> None:
    assert BatchScale(1024, 128, noise=600.0).scale_within_noise == 600 / 128
    assert BatchScale(1024, 128, noise=600.0, noise_bounds=(256.0, 2000.0)).scale_within_noise == 2
    assert BatchScale(1024, 128, noise=600.0, noise_bounds=(0.0, 2000.0)).scale_within_noise == 1
    assert BatchScale(1024, 128, noise=math.inf).scale_within_noise == 8
    assert BatchScale(1024, 128).scale_within_noise == 8


# The rules


@pytest.mark.parametrize(
    ("rule", "batch", "expected"),
    [
        (AdaScale(), BatchScale(512, 128, noise=384.0), Multipliers(4 * (384 + 128) / (384 + 512))),
        (AdaScale(), BatchScale(512, 128, gain=9.0), Multipliers(4.0)),  # never above linear
        (AdaScale(), BatchScale(512, 128, gain=0.2), Multipliers(1.0)),
        (AdaScale(), BatchScale(512, 128), Multipliers(1.0)),  # nothing is known of the noise
        (Linear(), BatchScale(512, 128), Multipliers(4.0)),
        (Sqrt(), BatchScale(512, 128), Multipliers(2.0, 4.0, 0.5)),
        (Sqrt(), BatchScale(2048, 128, noise=512.0), Multipliers(2.0, 4.0, 0.5)),
        (Sqrt(capped=False), BatchScale(2048, 128, noise=512.0), Multipliers(4.0, 16.0, 0.25)),
        (Sqrt(), BatchScale(2048, 128, noise=12.0), Multipliers()),
        (Sqrt(moments=False), BatchScale(512, 128), Multipliers(2.0)),
        (NoScaling(), BatchScale(512, 128), Multipliers()),
        (LEGW(5), BatchScale(512, 128, epoch=0.0), Multipliers(0.5)),
        (LEGW(5), BatchScale(512, 128, epoch=5.0), Multipliers(0.5)),
        (LEGW(5), BatchScale(512, 128, epoch=10.0), Multipliers(1.0)),
        (LEGW(5), BatchScale(512, 128, epoch=20.0), Multipliers(2.0)),
        (LEGW(5), BatchScale(512, 128, epoch=90.0), Multipliers(2.0)),
        (LEGW(0), BatchScale(512, 128, epoch=0.0), Multipliers(2.0)),
    ],
)
def test_factors(rule: ScalingRule, batch: BatchScale, expected: Multipliers) -> None:
    assert rule.multipliers(batch) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(SCALES, SCALES, NOISES, GAINS)
def test_learning_rate_is_between_once_and_scale_and_never_falls(
    rule: ScalingRule, one: float, other: float, noise: float | None, gain: float | None
) -> None:
    low, high = (rule.multipliers(BatchScale(128 * scale, 128, noise, gain=gain)) for scale in sorted((one, other)))
    for scale, by in zip(sorted((one, other)), (low, high), strict=True):
        assert 1 <= by.lr <= scale * (1 + 1e-12)
        assert 1 <= by.averages <= scale * (1 + 1e-12)
        assert 0 < by.eps <= 1
    # At one noise the gain grows with the scale; 1e-12 is the rounding of its three operations.
    assert low.lr <= high.lr * (1 + 1e-12)


@pytest.mark.parametrize("rule", [*RULES, LEGW(3)], ids=repr)
@given(NOISES, GAINS, st.floats(0, 100))
def test_base_batch_changes_nothing(rule: ScalingRule, noise: float | None, gain: float | None, epoch: float) -> None:
    assert rule.multipliers(BatchScale(96, 96, noise, gain=gain, epoch=epoch)) == Multipliers()


@given(st.floats(0, 20), SCALES, st.floats(0, 100))
def test_legw_is_the_ratio_of_two_warmups(warmup: float, scale: float, epoch: float) -> None:
    # The user's rate at this epoch times the factor is √S times a warm-up over S·E0 epochs.
    theirs = min(1.0, epoch / warmup) if warmup else 1.0
    longer = math.sqrt(scale) * (min(1.0, epoch / (warmup * scale)) if warmup else 1.0)
    factor = LEGW(warmup).multipliers(BatchScale(64 * scale, 64, epoch=epoch)).lr
    assert theirs * factor == pytest.approx(longer, rel=1e-9, abs=1e-300)
    assert factor <= math.sqrt(scale) * (1 + 1e-12)


def test_legw_needs_the_epoch() -> None:
    with pytest.raises(InvalidArgument, match=r"LEGW needs the epoch of a step, got None; give BatchScale\(epoch=…\)"):
        LEGW(5).multipliers(BatchScale(512, 128))
    with pytest.raises(InvalidArgument, match="warmup_epochs must be at least 0, got -1"):
        LEGW(-1)


# Which rule


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


class OwnSGD(torch.optim.SGD):
    """A user's own."""


@pytest.mark.parametrize(
    ("optimizer", "rule"),
    [
        (torch.optim.SGD(parameters(), 0.1), AdaScale()),
        (OwnSGD(parameters(), 0.1), AdaScale()),
        (FusedSGD(parameters(), 0.1), AdaScale()),
        (FusedLARS(parameters(), 0.1), AdaScale()),
        (torch.optim.Adam(parameters()), Sqrt()),
        (torch.optim.AdamW(parameters()), Sqrt()),
        (torch.optim.NAdam(parameters()), Sqrt()),
        (torch.optim.RAdam(parameters()), Sqrt()),
        (torch.optim.RMSprop(parameters()), Sqrt()),
        (torch.optim.SparseAdam(parameters()), Sqrt()),
        (FusedAdam(parameters()), Sqrt()),
        (FusedAdamW(parameters()), Sqrt()),
        (FusedLAMB(parameters()), Sqrt(moments=False)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, torch.optim.Optimizer) else "",
)
def test_rule_for(optimizer: torch.optim.Optimizer, rule: Rule) -> None:
    assert rule_for(optimizer) == rule


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Rprop, torch.optim.Adafactor])
def test_no_rule_is_said_in_one_sentence(kind: type[torch.optim.Optimizer]) -> None:
    rule = rule_for(kind(parameters()))  # type: ignore[call-arg]
    assert rule == NoScaling(
        f"No rule is known for {kind.__name__}, so its learning rate stays as it is at any batch size; "
        "pass a rule to scale it."
    )


def test_where_the_noise_is_known_roughly_its_lower_end_counts() -> None:
    """The estimate itself may be infinite by chance: the rate was linear in one step and not in the next."""
    bounds = BatchScale(256, 64, noise=math.inf, noise_bounds=(500.0, math.inf))
    assert AdaScale().multipliers(bounds).lr == AdaScale().multipliers(BatchScale(256, 64, noise=500.0)).lr < 3
    assert Sqrt().multipliers(bounds) == Sqrt().multipliers(BatchScale(256, 64, noise=500.0))
