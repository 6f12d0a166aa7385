"""The batch size in real loops: decided while they train, reported, and nothing lost."""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import entry, strategies
from accel.elastic.batch_size.policy import BatchPolicy
from accel.errors import InvalidArgument
from accel.goodput.efficiency import NoiseInterval
from accel.goodput.job import LostTime
from accel.integrations.trackers import metrics
from accel.session.session import Session
from tests.accel.elastic.batch_loops import PLAIN, Clock, batch_run, batch_run_of, growing, known_noise, nothing, train


def test_the_batch_grows_by_goodput_and_each_epoch_has_each_sample_once(job: Any, clock: Clock, noise: None) -> None:
    model, loader, optimizer = growing(job, 256)
    epochs = [train(model, loader, optimizer, clock, nothing) for _ in range(3)]

    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(3000))
    assert len({tuple(itertools.chain(*epoch)) for epoch in epochs}) == 3  # shuffled anew
    sizes = [len(batch) for batch in itertools.chain(*epochs)]
    assert sizes[0] == 8
    assert max(sizes) == 256
    assert batch_run(model).record.policy.batch == 256  # type: ignore[union-attr]
    assert len(loader) == -(-3000 // 256)


def test_the_batch_is_decided_by_the_last_known_noise_while_it_is_hidden(
    job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, hidden = NoiseInterval(5000.0, 4000.0, 6000.0), NoiseInterval(math.inf, 0.0, math.inf)
    noises = itertools.chain([known], itertools.repeat(hidden))
    monkeypatch.setattr("accel.elastic.batch_size.run_noise.interval_of", lambda estimate: next(noises))
    model, loader, optimizer = growing(job, 64)
    train(model, loader, optimizer, clock, nothing)
    assert loader.batch_sampler.batch_sizes == (64,)


def test_a_noise_scale_without_an_upper_end_is_none_in_the_report(
    job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pure = NoiseInterval(math.inf, 4000.0, math.inf)
    monkeypatch.setattr("accel.elastic.batch_size.run_noise.interval_of", lambda estimate: pure)
    model, loader, optimizer = growing(job, 64)
    train(model, loader, optimizer, clock, nothing)
    controller = batch_run(model).record.policy
    assert controller is not None and math.inf in [decision.noise for decision in controller.decisions]
    assert math.inf not in [row.noise for row in accel.explain(model).batch_rows]


def test_the_noise_of_the_loop_itself_lets_it_grow_and_its_labels_noise_does_not(clock: Clock) -> None:
    """Real measurements: a regression that is learnt, and one whose labels are random."""
    final = {}
    for name in ("learnt", "random"):
        torch.manual_seed(0)
        x = torch.randn(4000, 8)
        y = x.sum(1, keepdim=True) + 3 * torch.randn(4000, 1) if name == "learnt" else torch.randn(4000, 1)
        model = nn.Linear(8, 1)
        nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
        loader: Any = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.001)
        model, loader, optimizer = accel.optimize(
            model, loader, optimizer, elastic=accel.Elastic(max_batch_size=512), **PLAIN
        )
        for step, (a, b) in enumerate(itertools.chain(loader, loader)):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            clock.now += 1e-3 + len(a) * clock.sample_s
            optimizer.step()
            if step == 600:
                break
        controller = batch_run(model).record.policy
        assert controller is not None
        final[name] = controller.batch
        accel.undo(model)

    assert final["learnt"] >= 32
    assert final["random"] == 8


def test_the_batch_is_decided_during_a_search_in_steps_without_a_candidate(
    job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search may take a thousand steps: the noise was once measured, and the batch decided, only after it."""
    known_noise(monkeypatch, 1e5)
    steps = 0
    # Turns of ten steps, as of a trial.
    monkeypatch.setattr(Session, "is_busy", property(lambda self: steps // 10 % 2 == 1))
    left_out, begun_again, changed, measured = [], [], [], []
    monkeypatch.setattr(Session, "leave_out_step", lambda self: left_out.append(steps))
    monkeypatch.setattr(Session, "begin_again", lambda self, is_resized: begun_again.append(steps))
    model, loader, optimizer = growing(job, 64)

    def each(step: int) -> None:
        nonlocal steps
        run = batch_run(model)
        if run.noise.meter is not None and run.noise.meter.is_measuring:
            measured.append(steps)
        steps = step + 1
        if run.record.policy is not None and len(run.record.policy.decisions) > len(changed) + 1:
            changed.append(step)

    train(model, loader, optimizer, clock, each)
    assert changed and measured
    assert all(step // 10 % 2 == 0 for step in measured)
    others = set(left_out) - set(measured)  # after a rehearsal, and perhaps the step after the last one
    assert set(measured) <= set(left_out)
    assert len(others) <= len(changed) + 1
    assert len(begun_again) == len(changed)
    assert all(step // 10 % 2 == 0 for step in begun_again)


def test_calls_are_looked_at_only_in_steps_that_need_it(job: Any) -> None:
    model, loader, optimizer = accel.optimize(
        *job, elastic=accel.Elastic(max_batch_size=8), cache=False, disable=strategies.names()
    )
    run = batch_run(model)
    passed: dict[bool, list[bool]] = {True: [], False: []}
    for x, y, _ in itertools.chain(loader, loader, loader):
        if run.noise.meter is not None:
            passed[run.noise.meter.is_measuring].append(run._session.run.gate.passes)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    assert passed[True] and not any(passed[True])
    assert sum(passed[False]) > 0.5 * len(passed[False])
    assert run.noise.meter is not None and run.noise.meter.noise.measured > 3


def test_a_session_leaves_out_a_step_and_begins_again(job: Any) -> None:
    model, loader, optimizer = accel.optimize(*job, cache=False)
    session = entry.optimized(model).session  # type: ignore[union-attr]
    booked = []
    for step, (x, y, _) in enumerate(loader):
        booked.append(len(session.events.measured.result.measurements) + len(session.events.measured.result.settling))
        if step == 8:
            session.leave_out_step()
        if step == 10:
            session.begin_again()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if step == 12:
            break
    assert booked[8:] == [booked[8], booked[8], booked[8] + 1, 1, 2]


def test_the_report_says_what_was_decided_and_why(job: Any, clock: Clock, noise: None) -> None:
    model, loader, optimizer = growing(job, 64)
    train(model, loader, optimizer, clock, nothing)
    report = accel.explain(model)

    assert report.max_batch_size == 64
    assert [row.batch for row in report.batch_rows] == [8, 16, 32, 64]
    assert "2.00x the samples per second" in report.batch_rows[1].why
    assert report.batch_rows[1].measured == pytest.approx(report.batch_rows[1].goodput, rel=0.05)
    assert report.progress is not None
    assert report.progress > report.steps
    assert "8 → 64 samples" in str(report)
    assert metrics(report)["accel/batch_size"] == 64


def test_a_loop_whose_noise_cannot_be_measured_keeps_its_batch_and_the_report_says_why(clock: Clock) -> None:
    model = nn.Embedding(50, 4, sparse=True)
    data = TensorDataset(torch.randint(0, 50, (400,)))
    loader: Any = DataLoader(data, batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, loader, optimizer = accel.optimize(
        model, loader, optimizer, elastic=accel.Elastic(max_batch_size=64), **PLAIN
    )

    def epoch() -> None:
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    with pytest.warns(RuntimeWarning, match="the gradient noise can't be measured: a gradient is sparse"):
        epoch()

    assert "can't be measured" in accel.explain(model).batch_note
    assert loader.batch_sampler.batch_sizes == (4,)
    accel.undo(model)


def test_a_bound_below_the_loader_s_batch_is_refused(job: Any) -> None:
    with pytest.raises(InvalidArgument, match="at least the loader's batch over all ranks, 8 samples, got 4; raise"):
        accel.optimize(*job, elastic=accel.Elastic(max_batch_size=4))


def test_a_profile_is_rank_0s() -> None:
    """Each rank wrote one, those that don't decide with a model of the times that they never fitted."""
    run = batch_run_of(2, 8, 256)
    run.record.policy = create_autospec(BatchPolicy, instance=True, base_batch=16, replicas=2, micro_batches=1)
    run.noise.known = NoiseInterval(5000.0, 4000.0, 6000.0)
    run.record.leads = False
    assert run.report.profile(0.0, LostTime()) is None
