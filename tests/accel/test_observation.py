"""What the controller's look is told: where a real loop spends its time, and that the loop is left as it was."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import entry
from tests.accel import observation_ranks
from tests.comm.ranks import run_ranks


def test_a_loader_that_sleeps_is_named_and_the_marks_are_taken_out() -> None:
    class Slow(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            time.sleep(0.01)  # 40 ms a batch: the neighbours' share of a core can't hide that
            return super().__getitem__(index)

    backward, gradient = torch.autograd.backward, torch.autograd.grad
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = DataLoader(Slow(torch.randn(96, 4), torch.zeros(96, dtype=torch.long)), batch_size=4)
    _, loader, _ = accel.optimize(model, plain, optimizer, disable=accel_names(), budget=60)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    session = entry._optimized[model].session
    assert (torch.autograd.backward, torch.autograd.grad) == (backward, gradient)
    report = accel.explain(model)
    accel.undo(model)

    assert session.failed == ""
    assert report.bottleneck in ("input", "crowded cores")  # the machine may be crowded, and that is told then
    if report.bottleneck == "input":
        assert "waits for storage" in report.bottleneck_advice
        assert report.anatomy_before["data"] > 40.0
    assert report.anatomy_before["loss"] > 0
    assert report.anatomy_before["backward"] > 0


def test_what_ddp_waits_for_the_other_rank_is_communication() -> None:
    found, _ = run_ranks(observation_ranks.waits, 2)
    # Rank 1 comes 100 ms later to each exchange, and rank 0 computes for less than that on any machine.
    assert found["communication"] > 75
    assert found["backward"] < found["communication"]


def accel_names() -> tuple[str, ...]:
    from accel import strategies

    return strategies.names()
