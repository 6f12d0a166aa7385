"""The learning rate of each step in loops whose batch size changes while they train."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accel
from accel import entry
from accel.elastic.scaling_rules import BatchScale, Linear
from accel.goodput.efficiency import NoiseInterval
from tests.accel.elastic.batch_loops import PLAIN, Clock, batch_run, growing, nothing, train


def test_each_step_runs_at_the_learning_rate_of_its_batch(job: Any, clock: Clock, noise: None) -> None:
    model, loader, optimizer = job
    weights = [p for p in model.parameters()]
    before: list[Tensor] = []
    ratios: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: before.append(torch.cat([p.detach().flatten() for p in weights])))

    def moved(*_: Any) -> None:
        after = torch.cat([p.detach().flatten() for p in weights])
        gradient = torch.cat([p.grad.flatten() for p in weights if p.grad is not None])
        ratios.append(float((before[-1] - after).norm() / gradient.norm()) / 0.01)

    optimizer.register_step_post_hook(moved)
    model, loader, optimizer = growing(job, 64, scaling_rule=Linear())
    taken = train(model, loader, optimizer, clock, nothing)

    assert optimizer.param_groups[0]["lr"] == 0.01
    for ratio, batch in zip(ratios[5:], taken[5:], strict=True):
        assert ratio == pytest.approx(max(1.0, len(batch) / 8), rel=1e-3)
    assert {len(batch) for batch in taken} >= {8, 16, 32, 64}


@pytest.mark.parametrize(("kind", "factor"), [(torch.optim.Adam, 8**0.5), (torch.optim.SGD, 8 * 4008 / 4064)])
def test_rates_are_those_of_the_last_known_noise_when_it_is_not_known_any_more(
    job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch, kind: Any, factor: float, noise: None
) -> None:
    """Else Adam's would fall to that of the user's batch, and SGD's rise to eight times its own."""
    model, loader, optimizer = job
    elastic = accel.Elastic(max_batch_size=64)
    model, loader, optimizer = accel.optimize(model, loader, kind(model.parameters(), 1e-3), elastic=elastic, **PLAIN)
    train(model, loader, optimizer, clock, nothing)
    assert len(loader) == -(-3000 // 64)

    unknown = NoiseInterval(math.inf, 0.0, math.inf)  # the loss falls too slowly to show it
    monkeypatch.setattr("accel.elastic.batch_size.run_noise.interval_of", lambda estimate: unknown)
    (_, scaler), *_ = batch_run(model).rates._scalers
    rates: list[float] = []
    for _ in range(8):
        taken = train(model, loader, optimizer, clock, lambda step: rates.append(scaler.multipliers.lr))
        assert {len(batch) for batch in taken[:-1]} == {64}
        rates.pop()  # the last step of an epoch has fewer samples
    assert rates == pytest.approx([factor] * len(rates), rel=1e-3)


@pytest.mark.parametrize("odd", ["two passes", "another optimizer"])
def test_rates_follow_the_batch_where_nothing_can_be_accumulated(job: Any, clock: Clock, noise: None, odd: str) -> None:
    model, loader, optimizer = growing(job, 256, scaling_rule=Linear())
    other = torch.optim.SGD(model.parameters(), 0.0)
    scales: list[tuple[int, float]] = []
    for _ in range(3):
        for x, y, _ in loader:
            optimizer.zero_grad()
            output = model(x)
            for _ in range(2 if odd == "two passes" else 1):
                nn.functional.mse_loss(output, y).backward(retain_graph=True)
            clock.now += 1e-3 + len(x) * clock.sample_s
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            moved = math.hypot(
                *(float((b - p.detach()).norm()) for b, p in zip(before, model.parameters(), strict=True))
            )
            steep = math.hypot(*(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))
            if steep > 1e-2:  # less is lost in the rounding of the weights
                scales.append((max(8, len(x)), moved / steep / 0.01))
            if odd == "another optimizer":
                other.step()
    assert batch_run(model).report.note == ""
    assert max(size for size, _ in scales) > 8
    for size, scale in scales:
        assert scale == pytest.approx(size / 8, rel=0.05)


def test_a_rule_of_ones_own_is_asked(job: Any, clock: Clock, noise: None) -> None:
    asked: list[BatchScale] = []

    def rule(batch: BatchScale) -> float:
        asked.append(batch)
        return 1.0

    model, loader, optimizer = growing(job, 16, scaling_rule=rule)
    train(model, loader, optimizer, clock, nothing)
    assert {batch.batch_size for batch in asked} >= {16}
    assert asked[-1].base_batch_size == 8
    assert asked[-1].noise == 5000.0


def test_rates_stay_those_of_the_batch_where_the_session_hears_of_no_steps(job: Any, clock: Clock, noise: None) -> None:
    model, loader, optimizer = growing(job, 64, scaling_rule=Linear())
    train(model, loader, optimizer, clock, nothing)
    (_, scaler), *_ = batch_run(model).rates._scalers
    with accel.disabled():
        taken = train(model, loader, optimizer, clock, nothing)
        assert len(taken[0]) == 64
        assert scaler.multipliers.lr == max(1.0, len(taken[-1]) / 8)
    optimized = entry.optimized(model)
    assert optimized is not None
    optimized.session.close()  # as where the search itself fails
    taken = train(model, loader, optimizer, clock, nothing)
    assert scaler.multipliers.lr == max(1.0, len(taken[-1]) / 8)


def test_a_rule_by_the_epoch_is_asked_all_along_also_where_the_session_hears_of_no_steps(
    job: Any, clock: Clock, noise: None
) -> None:
    elastic = accel.Elastic(max_batch_size=64, scaling_rule=lambda batch: 1.0 + (batch.epoch or 0.0))
    model, loader, optimizer = accel.optimize(*job, elastic=elastic, **PLAIN)
    train(model, loader, optimizer, clock, nothing)
    (_, scaler), *_ = batch_run(model).rates._scalers
    epochs: list[float] = []
    train(model, loader, optimizer, clock, lambda step: epochs.append(scaler.multipliers.lr - 1))
    optimized = entry.optimized(model)
    assert optimized is not None
    optimized.session.close()
    train(model, loader, optimizer, clock, lambda step: epochs.append(scaler.multipliers.lr - 1))
    steps = math.ceil(3000 / 64)
    expected = [epoch + 64 * step / 3000 for epoch in (1, 2) for step in range(steps)]
    assert epochs == pytest.approx(expected, abs=0.0101)
