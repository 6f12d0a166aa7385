"""Loops that accumulate gradients themselves, or whose steps are made of several batches: what their batch becomes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.elastic.batch_size.policy import BatchDecision, BatchPolicy
from accel.elastic.batch_size.steps import batches_of_a_step
from accel.elastic.scaling_rules import NoScaling
from accel.goodput.efficiency import NoiseInterval
from tests.accel.elastic.batch_loops import PLAIN, Clock, batch_run, clock, growing, job, noise

__all__ = ["clock", "job", "noise"]


@pytest.mark.parametrize(("most", "reached"), [(64, 64), (99, 99 // 2 * 2), (90, 90)])
def test_a_loop_that_accumulates_keeps_its_batches_per_step(
    job: Any, clock: Clock, noise: None, most: int, reached: int
) -> None:
    model, loader, optimizer = growing(job, most)
    seen: list[int] = []
    for number, (x, y, index) in enumerate(loader):
        (nn.functional.mse_loss(model(x), y) / 2).backward()
        clock.now += 1e-3 + len(x) * clock.sample_s
        seen += index.tolist()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()

    controller = batch_run(model).record.controller
    assert controller is not None
    assert controller.base_batch == 16
    assert controller.batch == reached
    assert loader.batch_sampler.batch_sizes == (reached // 2,)
    assert sorted(seen) == list(range(3000))


@pytest.mark.parametrize(
    "clips", [pytest.param(False, marks=pytest.mark.slow, id="plain"), pytest.param(True, id="clips")]
)
def test_a_step_of_several_batches_is_one_of_all_their_samples(
    job: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch, clips: bool, noise: None
) -> None:
    resumed = False

    def decide(self: BatchPolicy, step: int, noise: NoiseInterval | None) -> BatchDecision:
        self.batches.accumulates, self.batches.largest_local = True, 9
        self._now = 32 if resumed or step >= 60 else 24 if step >= 20 else 8
        return self._decided(step, noise, "as the test says", 4)

    monkeypatch.setattr(BatchPolicy, "decide", decide)
    monkeypatch.setattr(BatchPolicy, "_goodput", lambda self, batch, noise: 1.0)
    plain = copy.deepcopy(job[0])
    own = torch.optim.SGD(plain.parameters(), 0.01)
    data = job[1].dataset
    model, loader, optimizer = growing(job, 32, scaling_rule=NoScaling())
    pending: list[int] = []
    samples: list[int] = []

    steps: list[list[int]] = []

    def stepped(*_: Any) -> None:
        samples.append(len(pending))
        steps.append([*pending])
        pending.clear()

    optimizer.register_step_post_hook(stepped)
    for _ in range(2):
        seen = []
        for x, y, index in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            clock.now += 1e-3
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            pending += index.tolist()
            seen += index.tolist()
            optimizer.step()
        assert sorted(seen) == list(range(3000))
        assert not pending  # an epoch ends with a step
    assert set(samples[:20]) == {8} and {24, 32} <= set(samples) <= {8, 16, 24, 32}
    assert batch_run(model).report.note == ""
    assert any(row.batch == 32 for row in accel.explain(model).batch_rows)
    state = batch_run(model).record.state_dict()
    assert (state["accumulated"], state["micro_batches"]) == (4, 1)
    accel.undo(model)
    assert "step" not in optimizer.__dict__
    for step in steps:  # the same with one batch of all its samples
        own.zero_grad()
        nn.functional.mse_loss(plain(data.x[step]), data.y[step]).backward()
        if clips:
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        own.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)

    # A run that goes on from there is not taken for one whose loop accumulates by itself.
    resumed = True
    model, loader, optimizer = accel.optimize(
        model, loader, optimizer, elastic=accel.Elastic(max_batch_size=32), **PLAIN
    )
    batch_run(model).record.load_state_dict(state)
    samples.clear()
    for x, y, index in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        clock.now += 1e-3
        pending += index.tolist()
        optimizer.step()
    assert set(samples[:4]) == {8} and set(samples[8:-1]) == {32}
    assert (batch_run(model).report.note, batch_run(model).record.state_dict()["micro_batches"]) == ("", 1)
    accel.undo(model)


def holding(loader: Any) -> Iterator[Any]:
    """Fetch each batch while the one before is trained on."""
    held = None
    for batch in loader:
        if held is not None:
            yield held
        held = batch
    yield held


@pytest.mark.parametrize("fetches_ahead", [False, True])
def test_a_loop_that_accumulates_nothing_is_left_to_itself_unless_it_fetches_ahead(
    job: Any, clock: Clock, fetches_ahead: bool
) -> None:
    """That it does is seen at its epoch's end: its batches are not those that a step begins with."""
    model, loader, optimizer = growing(job, 8)
    for step, (x, y, _) in enumerate(holding(loader) if fetches_ahead else loader):
        if step in (5, 200):
            assert ("step" in vars(optimizer)) == (step == 5 or fetches_ahead)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        clock.now += 1e-3
        optimizer.step()
    assert ("no batch of its own" in batch_run(model).record.step.refusal) == fetches_ahead


@pytest.mark.parametrize(
    ("counts", "before", "expected"),
    [
        ([(1, False)] * 4, None, 1),
        ([(5, False), (1, False), (1, False), (1, False)], None, 1),  # a look at five batches
        ([(4, False), (4, False), (4, False), (1, True)], None, 4),  # an epoch ends with fewer
        ([(2, True)] * 4, None, 2),  # each epoch is one step
        ([(4, False), (4, False), (1, True), (4, False)], 1, 4),
        ([(3, False), (1, False), (1, True), (3, False)], 1, 1),  # what the run before knew
        ([], None, 1),
    ],
)
def test_what_a_loop_accumulates_is_what_most_of_its_first_steps_do(
    counts: list[tuple[int, bool]], before: int | None, expected: int
) -> None:
    """It was what the fourth one did, also where that was an epoch's last, or came after a look."""
    assert batches_of_a_step(counts, before) == expected


def test_a_look_before_the_fourth_step_is_no_accumulation(job: Any, clock: Clock, noise: None) -> None:
    model, loader, optimizer = growing(job, 64)
    batches = iter(loader)
    for step in range(90):
        if step == 3:
            del batches
            list(itertools.islice(loader, 3))
            batches = iter(loader)
        x, y, _ = next(batches)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        clock.now += 1e-3
        optimizer.step()
    controller = batch_run(model).record.controller
    assert controller is not None and controller.base_batch == 8
    assert controller.batch == 64
