"""The batch size in loops that do what most don't: it keeps its promises, and none of its errors is the loop's."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import accel
from accel import entry
from accel.dataio.elastic_sampler import ElasticSampler
from accel.elastic.options import Checkpointing
from accel.elastic.sample_position import remaining_epochs
from accel.elastic.scaling_rules import Linear
from accel.errors import InvalidArgument
from tests.accel.elastic.batch_loops import PLAIN, Clock, Numbered, batch_run, growing, known_noise, nothing, train
from tests.accel.elastic.numbered_loop import fetched_ahead


class OwnStep(torch.optim.SGD):
    """Calls its base's step in its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_an_optimizer_that_calls_its_bases_step_is_one(job: Any, clock: Clock, noise: None) -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)  # from now on its class has hooks around each step
    model, loader, _ = job
    model, loader, optimizer = accel.optimize(
        model, loader, OwnStep(model.parameters(), 0.001), elastic=accel.Elastic(max_batch_size=64), **PLAIN
    )
    train(model, loader, optimizer, clock, nothing)
    optimized = entry.optimized(model)
    assert optimized is not None
    assert optimized.session.run.optimizers == [optimizer]
    assert batch_run(model).record.policy.batch > 8  # type: ignore[union-attr]


def test_a_batch_leaves_an_epoch_steps_to_be_judged_by(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    known_noise(monkeypatch, 50_000.0)
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    model, loader, optimizer = accel.optimize(
        model,
        DataLoader(Numbered(1000), batch_size=8, shuffle=True),
        optimizer,
        elastic=accel.Elastic(max_batch_size=512),
        **PLAIN,
    )
    for _ in range(60):
        train(model, loader, optimizer, clock, nothing)
    controller = batch_run(model).record.policy
    assert controller is not None
    assert 8 < controller.batch <= 250
    assert controller.steps_missing() == 0
    accel.undo(model)


def test_another_model_that_is_trained_before_the_loop_tells_nothing_of_its_losses(
    job: Any, clock: Clock, noise: None
) -> None:
    model, loader, optimizer = growing(job, 64)
    teacher = nn.Linear(8, 1)
    teaching = torch.optim.SGD(teacher.parameters(), 1e-3)
    for _ in range(40):
        teaching.zero_grad()
        teacher(torch.randn(8, 8)).square().mean().backward()
        teaching.step()
    run = batch_run(model)
    assert not run.noise.trend.falls()
    train(model, loader, optimizer, clock, nothing)
    assert run.report.note == "" and run.record.policy is not None and run.record.policy.batch == 64


def test_a_rule_that_fails_ends_the_following_and_not_the_loop(
    job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch, noise: None
) -> None:
    def failing(self: Any, *args: Any) -> None:
        if args[0] > 8:
            raise ZeroDivisionError("a rule of the user's")

    monkeypatch.setattr("accel.elastic.learning_rate.StepRates.follow", failing)
    model, loader, optimizer = growing(job, 64)
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError: a rule of the user's"):
        taken = train(model, loader, optimizer, clock, nothing)
    assert sorted(index for batch in taken for index in batch) == list(range(3000))


def test_a_loss_scale_that_halves_is_no_fall_of_the_loss(job: Any, clock: Clock) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    checkpoint = Checkpointing(folder=tempfile.mkdtemp(), more={"scaler": scaler})
    model, loader, optimizer = growing(job, 64, checkpoint=checkpoint)
    for step, (x, y, _) in enumerate(loader):
        optimizer.zero_grad()
        loss = 1 + 0.1 * torch.randn(()) + 1e-3 * nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(32768.0 if step == 100 else None)
        clock.now += 1e-3
        if step == 200:
            break
    assert not batch_run(model).noise.trend.falls()


def test_ranks_of_unequal_batches_are_refused(job: Any) -> None:
    model, loader, optimizer = job
    sampler = ElasticSampler(3000, batch_size=[20, 6], num_replicas=2, rank=0)
    with pytest.raises(InvalidArgument, match=r"needs batches of one size on all ranks, got \[20, 6\]"):
        accel.optimize(
            model,
            DataLoader(loader.dataset, batch_sampler=sampler),
            optimizer,
            elastic=accel.Elastic(max_batch_size=64),
            **PLAIN,
        )


def test_looks_at_the_training_samples_take_none_from_it(job: Any, clock: Clock, noise: None) -> None:
    model, loader, optimizer = growing(job, 64)
    for epoch in range(3):
        taken = train(model, loader, optimizer, clock, lambda step: next(iter(loader)) if step in (3, 40) else None)
        assert sorted(index for batch in taken for index in batch) == list(range(3000))
        with torch.no_grad():
            for step, (x, _, _) in enumerate(loader):
                model(x)
                if epoch == 1 and step == 3:
                    break
    assert list(remaining_epochs(loader, 5)) == [3, 4]


def in_parts(steps: int, loader: Any, held: bool, most: int) -> Iterator[Any]:
    """Yield batches of passes that are left after so many steps, at the batch that follows."""
    taken, batches = 0, None
    while taken < most:
        if not held:
            batches = None
        batches = enumerate(loader)
        for step, batch in batches:
            if step == steps:
                break
            yield batch
            taken += 1


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("steps", [1, 7])
def test_a_batch_that_comes_again_after_a_break_is_no_look(
    job: Any, clock: Clock, noise: None, steps: int, held: bool
) -> None:
    model, loader, optimizer = growing(job, 64)
    seen: list[int] = []
    for x, y, index in in_parts(steps, loader, held, most=120):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        clock.now += 1e-3 + len(x) * clock.sample_s
        optimizer.step()
        seen += index.tolist()
    run = batch_run(model)
    assert run.record.policy is not None
    assert (run.report.note, run.record.policy.base_batch) == ("", 8)
    assert len(set(seen[:3000])) == len(seen[:3000])


@pytest.mark.parametrize("ahead", [1, 2])
def test_the_rate_is_that_of_the_batch_that_is_trained_on(job: Any, clock: Clock, noise: None, ahead: int) -> None:
    """It was that of the batch fetched last: the last steps on the small batch ran at the rate of the large one."""
    model, loader, optimizer = growing(job, 64, scaling_rule=Linear())
    in_training: list[int] = []
    rates: list[tuple[int, float]] = []
    optimizer.register_step_pre_hook(
        lambda *_: rates.append((in_training[-1], batch_run(model).rates._scalers[0][1].multipliers.lr))
    )
    for _ in range(2):
        for x, y, _ in fetched_ahead(loader, ahead):
            in_training.append(len(x))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            clock.now += 1e-3 + len(x) * clock.sample_s
            optimizer.step()
    assert {size for size, _ in rates} >= {8, 16, 32, 64}
    assert [rate for _, rate in rates[8:]] == [max(1.0, size / 8) for size, _ in rates[8:]]
