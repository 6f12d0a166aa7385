"""The meter against known noise: closed form under each optimizer, per-sample gradients, every way to train."""

from __future__ import annotations

import doctest
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from accel.errors import InvalidArgument
from accel.goodput import noise_gradients, noise_meter, noise_replay, noise_schedule
from accel.goodput.noise_gradients import GradientTap
from accel.goodput.noise_meter import NoiseMeter
from accel.goodput.noise_schedule import _AFTERWARDS, _EVENTS_S, OVERHEAD, NoiseSchedule
from tests.accel.autograd_functions import OneGradient
from tests.accel.goodput.noise_loops import (
    OPTIMIZERS,
    Kept,
    Regression,
    finish,
    half_square,
    meter_for,
    per_sample_truth,
    train,
    with_meter,
)


@pytest.mark.parametrize(
    "module",
    [noise_gradients, noise_meter, noise_replay, noise_schedule],
    ids=lambda module: module.__name__.rpartition(".")[2],
)
def test_module_examples_run(module: Any) -> None:
    torch.manual_seed(0)
    assert doctest.testmod(module).failed == 0


class Readings:
    """A clock that goes on by each reading, so that measuring costs something on any machine."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


# Closed form


def sum_of(rows: list[tuple[float, float]], column: int) -> float:
    return math.fsum(row[column] for row in rows)


@pytest.mark.sample(2, every_value=False)
@pytest.mark.parametrize(
    ("name", "accumulation"), [*((name, count) for name in OPTIMIZERS for count in (1, 2)), ("sgd", 8), ("adam", 8)]
)
def test_regression_is_within_ten_percent_of_the_closed_form(name: str, accumulation: int) -> None:
    """The truth moves with the weights, so sums are compared: mean measured ÷ mean true, over the measured steps."""
    problem, size = Regression(dimensions=40, noise=1.0, seed=accumulation), 32
    model = problem.model(3.0)
    optimizer = OPTIMIZERS[name](model.parameters())
    noise = Kept()
    meter = meter_for(model, optimizer, noise=noise)
    measured, true = [], []
    steps = train(
        meter,
        model,
        optimizer,
        lambda _: problem.batch(size),
        half_square,
        steps=240 if accumulation < 8 else 120,
        accumulation=accumulation,
    )
    weights = model.weight.detach()[0].clone()
    denominators = None
    for _ in steps:
        if len(noise.all) > len(measured):
            measured.append((noise.all[-1].squared_norm, noise.all[-1].variance))
            true.append(problem.truth(weights, denominators))
        weights = model.weight.detach()[0].clone()
        if "adam" in name:
            found = noise_gradients.denominators([model.weight], [optimizer])
            assert found is not None
            denominators = found.clone()
    assert not meter.reason
    assert len(measured) > 50
    squared_norm, variance = (sum_of(measured, i) / sum_of(true, i) for i in (0, 1))
    assert variance == pytest.approx(1, rel=0.1)
    assert squared_norm == pytest.approx(1, rel=0.1)
    assert variance / squared_norm == pytest.approx(1, rel=0.1)


def test_labels_of_pure_noise_give_no_certain_phi() -> None:
    """At the optimum of a regression on noise ‖μ‖² is 0: whatever φ is at a moment, its lower end stays at 0."""
    problem = Regression(dimensions=40, noise=1.0, seed=5)
    model = problem.model(0.0)
    optimizer, _, meter = with_meter(model)
    lows = [
        meter.noise.estimate().low
        for _ in train(meter, model, optimizer, lambda _: problem.batch(16), half_square, steps=210)
    ]
    assert meter.noise.measured > 90
    assert meter.noise.estimate().high == math.inf
    assert max(lows) == 0


# Per-sample gradients


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 6, 2, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(54, 5)
    )


@pytest.mark.parametrize("make", [mlp, cnn])
def test_one_batch_has_the_noise_of_its_samples(make: Callable[[], nn.Module]) -> None:
    """Over random halves of one batch of n, tr(Σ) has the mean n / (n - 1) times the samples' variance, exactly."""
    torch.manual_seed(1)
    model, x, y = make(), torch.randn(24, 12), torch.randint(0, 5, (24,))
    square, variance = per_sample_truth(model.double(), F.cross_entropy, x, y)
    model.float()
    optimizer, noise, meter = with_meter(model)
    finish(train(meter, model, optimizer, lambda _: (x, y), F.cross_entropy, steps=210))
    assert len(noise.all) > 90
    for sums in noise.all:
        assert sums.mean_square == pytest.approx(square, rel=1e-4)
        assert sums.samples == pytest.approx(24)
    average = math.fsum(sums.variance for sums in noise.all) / len(noise.all)
    assert average == pytest.approx(variance * 24 / 23, rel=0.1)
    averaged_norm = math.fsum(sums.squared_norm for sums in noise.all) / len(noise.all)
    assert averaged_norm == pytest.approx(square - variance / 23, abs=0.1 * (square + variance / 23))


# Ways to train


def classifier(
    model: nn.Module, seed: int = 0, size: int = 16
) -> tuple[Callable[[int], tuple[Tensor, Tensor]], Callable[[Tensor, Tensor], Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, 12, generator=generator)
        return x, x[:, :5].argmax(1)

    return batch, F.cross_entropy


def measured(model: nn.Module, optimizer: Optimizer, *, steps: int = 60, **options: Any) -> tuple[NoiseMeter, Kept]:
    noise = Kept()
    meter = meter_for(model, optimizer, noise=noise, **{k: v for k, v in options.items() if k not in ("between",)})
    batch, loss = classifier(model)
    finish(train(meter, model, optimizer, batch, loss, steps=steps, between=options.get("between", lambda: None)))
    return meter, noise


def test_clipping_does_not_touch_the_measurement() -> None:
    sums = []
    for clip in (False, True):
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.0)

        def between(model: nn.Module = model, clip: bool = clip) -> None:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

        _, noise = measured(model, optimizer, between=between)
        sums.append(noise.all)
    assert sums[0] == sums[1]
    assert sums[0]


def test_loop_may_begin_to_accumulate_and_end_it() -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer, noise, meter = with_meter(model)
    batch, loss = classifier(model)
    for accumulation in (1, 4, 1):
        finish(train(meter, model, optimizer, batch, loss, steps=30, accumulation=accumulation))
        assert noise.all[-1].samples == 16 * accumulation
        assert not meter.refusal
    truth = [sum(s.variance for s in noise.all if s.samples == size) for size in (16, 64)]
    counts = [sum(s.samples == size for s in noise.all) for size in (16, 64)]
    assert truth[0] / counts[0] == pytest.approx(truth[1] / counts[1], rel=0.2)


def test_optimizer_with_a_closure_is_refused() -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    meter = meter_for(model, optimizer)
    optimizer.register_step_pre_hook(lambda own, args, kwargs: meter.before_update(own))
    batch, loss = classifier(model)
    for step in range(20):
        meter.begin_step()
        x, y = batch(step)
        meter.begin_batch(16)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            value = loss(meter.call(model, (x,), {}) if meter.wants_call else model(x), y)
            value.backward()  # type: ignore[no-untyped-call]
            return value

        optimizer.step(closure)
        meter.clock.now += 1  # type: ignore[attr-defined]
        meter.end_step()
    assert "no gradient has arrived at the parameters before the optimizer's step" in meter.refusal
    assert not any(p._backward_hooks for p in model.parameters())


def test_frozen_and_shared_and_unused_parameters() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
            self.second.weight = self.first.weight
            self.frozen = nn.Linear(12, 12).requires_grad_(False)
            self.unused, self.head = nn.Linear(12, 3), nn.Linear(12, 5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(torch.tanh(self.frozen(self.second(torch.tanh(self.first(x))))))
            return out

    torch.manual_seed(0)
    model = Odd()
    batch, loss = classifier(model)
    x, y = batch(0)
    used = nn.ModuleDict({"first": model.first, "second": model.second, "head": model.head})
    parameters = [p for p in used.parameters() if p.requires_grad]
    each = [torch.autograd.grad(loss(model(x[i : i + 1]), y[i : i + 1]), parameters) for i in range(len(x))]
    flat = torch.stack([torch.cat([g.flatten() for g in own]) for own in each]).double()
    variance = float((flat - flat.mean(0)).square().sum(1).mean()) * 16 / 15
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.0)
    noise = Kept()
    finish(train(meter_for(model, optimizer, noise=noise), model, optimizer, lambda _: (x, y), loss, steps=300))
    assert noise.all[0].mean_square == pytest.approx(float(flat.mean(0).square().sum()), rel=1e-4)
    average = math.fsum(sums.variance for sums in noise.all) / len(noise.all)
    assert average == pytest.approx(variance, rel=0.1)


def test_several_optimizers_have_one_noise_scale() -> None:
    torch.manual_seed(0)
    model = mlp()
    first, second = (torch.optim.SGD(part.parameters(), 0.0) for part in (model[0], model[2]))  # type: ignore[index]
    noise = Kept()
    meter = meter_for(model, first, second, noise=noise)
    batch, loss = classifier(model)

    def update() -> None:
        for optimizer in (first, second):
            meter.before_update(optimizer)
            optimizer.step()
            optimizer.zero_grad()

    finish(train(meter, model, first, batch, loss, steps=40, update=update))
    torch.manual_seed(0)
    alone = mlp()
    _, expected = measured(alone, torch.optim.SGD(alone.parameters(), 0.0), steps=40)
    assert noise.all
    assert noise.all == expected.all


def test_steps_with_gradients_that_are_not_finite_are_skipped() -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer, noise, meter = with_meter(model)
    batch, loss = classifier(model)

    def bad(output: Tensor, y: Tensor) -> Tensor:
        value = loss(output, y)
        return value * math.nan if len(noise.all) % 2 == 0 else value * (math.inf if len(noise.all) % 3 == 0 else 1)

    state = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in train(meter, model, optimizer, batch, bad, steps=60):
        model.load_state_dict(state)  # NaN times a rate of 0 is NaN
    assert noise.skipped > 5
    assert noise.measured > 5
    assert not meter.refusal
    assert math.isfinite(noise.squared_norm) and math.isfinite(noise.variance)


def test_noise_is_measured_in_adams_coordinates() -> None:
    """With v̂ put in by hand, ‖P G‖² is known."""
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.5), eps=0.25)
    v = torch.tensor([[1.0, 4.0, 16.0]])
    optimizer.state[model.weight] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(v), "exp_avg_sq": v / 2}
    found = noise_gradients.denominators([model.weight], [optimizer])
    assert found is not None
    assert torch.allclose(found, torch.tensor([1.25, 2.25, 4.25]))
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    assert noise_gradients.denominators([model.weight], [optimizer, sgd]) is None


# What is left behind, and what it costs


def test_nothing_is_installed_between_measured_steps() -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    meter = NoiseMeter(model, [optimizer])
    meter.clock = Readings()
    meter._schedule = NoiseSchedule(0.05)
    batch, loss = classifier(model)
    seen = []
    for _ in train(
        meter,
        model,
        optimizer,
        batch,
        loss,
        steps=200,
        between=lambda: seen.append(any(p._backward_hooks for p in model.parameters())),
    ):
        assert not any(p._backward_hooks for p in model.parameters())
        assert not meter.wants_call
    assert 1 < sum(seen) <= 0.2 * len(seen)
    assert meter.noise.measured == sum(seen)
    meter.close()
    finish(train(meter, model, optimizer, batch, loss, steps=30))
    assert meter.refusal == "the meter is closed"


def test_training_is_the_same_with_and_without_a_meter() -> None:
    """Dropout and batch normalisation too: draws, buffers and gradients are as they would be."""
    states = []
    for metered in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 5))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        batch, loss = classifier(model)
        meter = meter_for(model, optimizer)
        if not metered:
            meter.close()
        finish(train(meter, model, optimizer, batch, loss, steps=60))
        assert (meter.noise.measured > 5) == metered
        states.append([*model.state_dict().values(), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


@pytest.mark.parametrize("overhead", [0.03, 0.2])
def test_measuring_takes_its_share_of_the_run(overhead: float) -> None:
    """By a clock that counts what is done: 1 ms for a step, 5 ms for the measuring code."""

    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    class SlowReplay(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            is_replay = torch.is_grad_enabled() and meter._measured is not None and meter._measured.updated
            clock.now += 2.5e-3 * is_replay
            return super().forward(x)

    clock = Clock()
    model = SlowReplay(12, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    meter = NoiseMeter(model, [optimizer])
    meter.clock = clock
    meter._schedule = NoiseSchedule(overhead)
    batch, _ = classifier(model)

    def loss(output: Tensor, y: Tensor) -> Tensor:
        clock.now += 1e-3
        return F.cross_entropy(output, y)

    finish(train(meter, model, optimizer, batch, loss, steps=1000))
    at_once = 12 * 5e-3  # the first measurements, which later ones make up for
    assert meter.noise.measured > 12
    assert (clock.now - 1.0 - at_once) / 1.0 <= 1.2 * overhead + 0.01


def test_the_first_measurements_are_made_up_for() -> None:
    schedule, measured_s, steps = NoiseSchedule(0.03), 0.0, 0
    while steps < 20_000:
        while not schedule.is_due():
            schedule.note_step(1e-3)
            steps += 1
        schedule.pay(2e-3, schedule.usual_s)
        measured_s += 2e-3
    took_s = _AFTERWARDS * measured_s + _EVENTS_S * steps
    assert 0.9 * 0.03 < took_s / (steps * 1e-3) < 1.01 * 0.03


@pytest.mark.parametrize(
    ("cost_s", "most_apart"),
    [
        (lambda number: 5e-3, 105),
        (lambda number: 0.3 if number == 0 else 5e-3, 300),
        (lambda number: 0.3 if number in (0, 5, 14, 40) else 5e-3, 400),  # 0.3 s alone are worth 4,800 steps
        (lambda number: 0.1 if number % 5 == 0 else 5e-3, 600),
        (lambda number: 2.0 if number == 60 else 5e-3, 600),
        (lambda number: 1e-3 if number % 4 == 0 else 8e-3, 170),
        (lambda number: 5e-5 if number % 7 == 0 else 5e-3, 105),
    ],
)
def test_what_is_beyond_the_usual_is_paid_for_by_and_by(cost_s: Callable[[int], float], most_apart: int) -> None:
    """A new batch size on a GPU, or a busy machine: a job had the noise scale of its beginning for 750 steps."""
    schedule, at, spent_s, steps = NoiseSchedule(), list[int](), 0.0, 100_000
    for step in range(steps):
        if schedule.is_due():
            cost = cost_s(len(at))
            schedule.pay(cost, schedule.usual_s)
            spent_s += _AFTERWARDS * cost
            at.append(step)
        else:
            schedule.note_step(5e-3)
    assert max(later - earlier for earlier, later in itertools.pairwise(at)) <= most_apart
    assert 0.9 * OVERHEAD < spent_s / (5e-3 * steps) < 1.2 * OVERHEAD


def test_steps_as_short_as_their_events_are_measured_at_half_the_share() -> None:
    schedule = NoiseSchedule(0.02)
    for _ in range(20):
        schedule.note_step(1e-5)
    for _ in range(60):
        schedule.pay(1e-4, schedule.usual_s)
    assert schedule.steps_left == math.ceil(1.25 * _AFTERWARDS * 1e-4 / (0.01 * 1e-5))


def test_nothing_is_left_at_the_parameters_but_the_users_own_hooks() -> None:
    """An empty table of hooks once stayed at each parameter: every backward pass asked it, 1 % of a short step."""
    weights = [torch.ones(2, requires_grad=True) for _ in range(3)]
    asked: list[Tensor] = []
    handle = weights[0].register_hook(asked.append)  # type: ignore[no-untyped-call]
    tap = GradientTap(weights)
    tap.install()
    sum(weight.sum() for weight in weights).backward()  # type: ignore[union-attr]
    tap.remove()
    assert [weight._backward_hooks is None for weight in weights] == [False, True, True]
    sum(weight.sum() for weight in weights).backward()  # type: ignore[union-attr]
    assert len(asked) == 2
    handle.remove()


@given(st.lists(st.tuples(st.floats(1e-5, 1e-2), st.floats(0.1, 10), st.booleans()), min_size=30, max_size=300))
def test_ranks_measure_at_the_same_steps_however_long_their_own_take(steps: list[tuple[float, float, bool]]) -> None:
    ours, theirs = NoiseSchedule(0.03), NoiseSchedule(0.03)
    for seconds, factor, is_skipped in steps:
        assert ours.is_due() == theirs.is_due()
        if ours.is_due():
            ours.pay(2e-3, 1e-3), theirs.pay(2e-3, 1e-3)  # as they have agreed
        elif is_skipped:
            ours.skip_step(), theirs.skip_step()
        else:
            ours.note_step(seconds), theirs.note_step(factor * seconds)


@pytest.mark.parametrize("replicas", [0, -1])
def test_replicas_are_counted_from_one(replicas: int) -> None:
    with pytest.raises(InvalidArgument, match="replicas must be at least 1"):
        NoiseMeter(nn.Linear(1, 1), [], replicas=replicas)


def test_a_weight_without_gradients_so_far_does_not_make_all_of_the_noise() -> None:
    """A letter that comes for the first time: Adam has averaged nothing for its row, and 1 / √v̂ is without bounds."""
    table = nn.Embedding(4, 8)
    optimizer = torch.optim.Adam(table.parameters(), 0.01)
    for _ in range(20):
        optimizer.zero_grad()
        table(torch.tensor([0, 1, 2])).square().sum().backward()
        optimizer.step()

    found = noise_gradients.denominators([table.weight], [optimizer])
    assert found is not None
    rows = found.view(4, 8)
    usual = float(rows[:3].square().mean().sqrt())
    assert float(rows[3].min()) >= 0.05 * usual
    average = optimizer.state[table.weight]["exp_avg_sq"][:3] / (1 - 0.999**20)
    above = average.sqrt() > 0.1 * usual
    assert torch.allclose(rows[:3][above], (average.sqrt() + 1e-8)[above])  # those that it has averaged are as Adam's


def test_a_tensor_without_gradients_so_far_is_left_out() -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([used, unused], 0.01)
    used.grad, unused.grad = torch.ones(3), torch.zeros(2)
    optimizer.step()

    found = noise_gradients.denominators([used, unused], [optimizer])
    assert found is not None
    assert (torch.ones(5) / found).tolist() == pytest.approx([1, 1, 1, 0, 0], rel=1e-6)


def test_a_tap_takes_a_parameter_that_a_function_gives_no_gradient() -> None:
    x, weight = (torch.ones(2, requires_grad=True) for _ in range(2))
    tap = GradientTap([x, weight])
    tap.install()
    for _ in range(2):  # a hook that raised would raise in the loop's own backward pass
        OneGradient.apply(x, weight).sum().backward()
    own, other = tap.take()
    tap.remove()
    assert own is not None and own.tolist() == [2.0, 2.0]
    assert other is None
