"""Loops that accumulate gradients themselves, or whose steps are made of several batches: what their batch becomes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torch import nn

from accel.elastic.batch_size.steps import batches_of_a_step
from tests.accel.elastic.batch_loops import Clock, batch_run, growing


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

    controller = batch_run(model).record.policy
    assert controller is not None
    assert controller.base_batch == 16
    assert controller.batch == reached
    assert loader.batch_sampler.batch_sizes == (reached // 2,)
    assert sorted(seen) == list(range(3000))


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
    controller = batch_run(model).record.policy
    assert controller is not None and controller.base_batch == 8
    assert controller.batch == 64
