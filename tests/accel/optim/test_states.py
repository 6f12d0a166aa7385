"""States that an optimizer has made and must take back: of weights that were never updated, too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from accel.amp import decorate, master_params
from accel.optim import FusedAdam, FusedAdamW, FusedLAMB, FusedSGD
from tests.accel.amp.amp_models import batches, loss_of, mlp

KINDS: list[Any] = [FusedAdam, FusedAdamW, FusedLAMB, lambda params: FusedSGD(params, 0.1, 0.9, dampening=0.1)]


def made(kind: Any, seed: int = 0) -> tuple[nn.Module, Any]:
    model = mlp(seed)
    model, optimizer = decorate(model, kind(model.parameters()), dtype=torch.bfloat16)
    return model, optimizer


def train(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for x, target in batches(last, 8)[first:]:
        optimizer.zero_grad()
        loss_of(model(x), target).backward()
        optimizer.step()


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_masters_of_weights_that_were_never_updated_are_taken_back(kind: Any, steps: int) -> None:
    """They are there from the beginning, where moments and step counters come with the first update."""
    model, optimizer = made(kind)
    model[0].requires_grad_(False)
    train(model, optimizer, 0, steps)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, others = made(kind, seed=1)
    other.load_state_dict(saved[0])
    others.load_state_dict(saved[1])
    assert all(map(torch.equal, master_params(others), master_params(optimizer)))
    for each, own in ((model, optimizer), (other, others)):  # the first update of the frozen layer is its first
        each.requires_grad_(True)
        train(each, own, steps, steps + 3)
    assert all(map(torch.equal, master_params(others), master_params(optimizer)))


@pytest.mark.parametrize("kind", [FusedAdamW, FusedLAMB])
def test_states_without_anything_are_taken(kind: Any) -> None:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = kind(params)
    params[0].grad = torch.ones(2)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][1] = {}
    again = kind([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))])
    again.load_state_dict(state)
    assert len(next(iter(again.state.values()))) == 3
