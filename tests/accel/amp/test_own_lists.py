"""Optimizers at O2 whose step updates parameters from lists of its own, where no master weights stand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel.amp import decorate, master_params
from accel.errors import InvalidArgument
from tests.accel.amp.amp_models import batches, by_hand, loss_of, mlp


class Wraps(torch.optim.Optimizer):
    """Hands its step to another optimizer, whose groups are its own or, as ZeroRedundancyOptimizer has it, others."""

    def __init__(self, params: Any, shares: bool) -> None:
        super().__init__(params, {"lr": 0.05})
        self.parts = [torch.optim.SGD([p for group in self.param_groups for p in group["params"]], 0.05, momentum=0.9)]
        if shares:
            self.param_groups = self.parts[0].param_groups

    def step(self, closure: Any = None) -> Any:
        for part in self.parts:
            part.step()


class Blocks(torch.optim.Optimizer):
    """Makes blocks of its parameters once, as Shampoo does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.blocks = [(p, p.shape) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p, _ in self.blocks:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.05)


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Has nothing but the name: torch's makes its groups when it knows the buckets."""


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for x, target in batches(steps, 8):
        optimizer.zero_grad()
        loss_of(model(x), target).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "make", [lambda params: Wraps(params, shares=False), lambda params: ZeroRedundancyOptimizer(params, 0.05)]
)
def test_one_that_hands_its_step_to_others_with_groups_of_their_own_is_refused(make: Any) -> None:
    """Its steps were undone without a word: they updated 16-bit weights, over which masters were written."""
    model = mlp()
    with pytest.raises(InvalidArgument, match=r"can't have master weights: it keeps its own list.* Use O1"):
        decorate(model, make(model.parameters()), dtype=torch.bfloat16)
    assert model[0].weight.dtype == torch.float32
    model, optimizer = decorate(model, make(model.parameters()), level="O1", dtype=torch.float16)
    before = model[0].weight.detach().clone()
    train(model, optimizer, 2)
    assert not torch.equal(before, model[0].weight)


def test_one_that_shares_its_groups_with_others_trains_masters() -> None:
    model = mlp()
    model, optimizer = decorate(model, Wraps(model.parameters(), shares=True), dtype=torch.bfloat16)
    train(model, optimizer, 4)
    sgd = lambda params: torch.optim.SGD(params, 0.05, momentum=0.9)  # noqa: E731
    expected = by_hand(mlp(), sgd, batches(4, 8), torch.bfloat16, 1.0)
    assert all(map(torch.equal, master_params(optimizer), expected))


def test_a_step_that_updates_16_bit_weights_itself_is_refused() -> None:
    model = mlp()
    model, optimizer = decorate(model, Blocks(model.parameters()), dtype=torch.bfloat16)
    before = [*(m.clone() for m in master_params(optimizer)), *(p.detach().clone() for p in model.parameters())]
    with pytest.raises(InvalidArgument, match=r"Found: Blocks, whose step has written to a 16-bit parameter.* Use O1"):
        train(model, optimizer, 1)
    assert all(map(torch.equal, before, [*master_params(optimizer), *model.parameters()]))
