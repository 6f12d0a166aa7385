"""Graphs that wait for their backward pass don't notice what is put back in the meantime."""

from __future__ import annotations

import torch
from torch import nn

from accel.guard import guard
from accel.guard.changing_buffers import ChangingBuffers

CPU = torch.device("cpu")


def model_with_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def test_calls_may_be_replayed_between_two_backward_passes() -> None:
    """Each has saved the running statistics, by their version."""
    model = model_with_statistics()
    first, second = model(torch.randn(4, 2)), model(torch.randn(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    recording = guard.record(model, CPU, (torch.randn(4, 2),), {})
    first.sum().backward()
    with guard.untouched(model, CPU):
        recording.modules.restore()
        guard.replay(model, model, recording)
    second.sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_second_of_two_calls_may_be_made_again() -> None:
    model = model_with_statistics()
    moving = ChangingBuffers(model)
    for _ in range(3):
        moving.observe()
        model(torch.randn(4, 2))
    first, saved = model(torch.randn(4, 2)), moving.saved()
    model(torch.randn(4, 2))
    moving.restore(saved)
    (first + model(torch.randn(4, 2))).sum().backward()


def test_a_buffer_that_has_grown_is_put_back() -> None:
    model = model_with_statistics()
    model.register_buffer("queue", torch.ones(2))
    with guard.untouched(model, CPU):
        model.queue.resize_(4).fill_(5.0)  # type: ignore[operator, union-attr]
    assert model.queue.tolist() == [1.0, 1.0]  # type: ignore[operator, union-attr]
