"""Which ways a gradient may take past the loss scale, and which are seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accel.amp import decorate, master_params
from accel.errors import InvalidArgument
from tests.accel.amp.amp_models import batches, loss_of, mlp


class Checkpointed(nn.Module):
    """Computes its middle again in the backward pass, which runs one of its own there."""

    def __init__(self, is_on: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.is_on = is_on

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(self.middle, x, use_reentrant=True) if self.is_on else self.middle(x)  # type: ignore
        out: Tensor = self.last(x.tanh())
        return out


def test_checkpointed_activations_are_no_bypass() -> None:
    outcomes = []
    for is_on in (False, True):
        model = Checkpointed(is_on)
        model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.float16)
        for x, target in batches(4, 8):
            optimizer.zero_grad()
            loss_of(model(x), target).backward()
            optimizer.step()
        outcomes.append([m.clone() for m in master_params(optimizer)])
    assert all(map(torch.equal, *outcomes))


def test_a_penalty_on_gradients_that_comes_late_is_refused() -> None:
    """Lazy regularisation has it every 16th step: the first passes, once all that were looked at, have none."""
    critic: Any = mlp()
    critic, optimizer = decorate(critic, torch.optim.SGD(critic.parameters(), 0.1), dtype=torch.float16)
    for x, target in batches(4, 8):
        optimizer.zero_grad()
        loss_of(critic(x), target).backward()
        optimizer.step()
    x.requires_grad_()
    optimizer.zero_grad()
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    loss_of(critic(x), target).backward()
    with pytest.raises(InvalidArgument, match="must get their gradients through its output"):
        gradient.square().sum().backward()
