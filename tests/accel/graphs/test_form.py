"""What a graph's key says of a model, kept from call to call: each change to the model shows in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from accel.graphs.owners import Owners


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.BatchNorm1d(4))
        self.scale = 2.0

    def forward(self, x: Any) -> Any:
        return self.inner(x) * self.scale


class Other(nn.Linear):
    pass


def _swap_data(net: Any) -> None:
    net.inner[0].weight.data = torch.zeros(4, 4)


def _as_float(net: Any) -> None:
    net.inner[0].in_features = 4.0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "memory of a weight": _swap_data,
    "memory of a buffer": lambda net: net.inner[2].running_mean.set_(torch.zeros(4)),
    "another weight": lambda net: setattr(net.inner[0], "weight", nn.Parameter(torch.zeros(4, 4))),
    "another buffer": lambda net: setattr(net.inner[2], "running_var", torch.ones(4)),
    "a frozen weight": lambda net: net.inner[0].weight.requires_grad_(False),
    "a bias less": lambda net: setattr(net.inner[0], "bias", None),
    "evaluation": lambda net: net.eval(),
    "a rate": lambda net: setattr(net.inner[1], "p", 0.2),
    "a number of its own": lambda net: setattr(net, "scale", 3.0),
    "the same as a float": _as_float,
    "a new number": lambda net: setattr(net, "shift", 1.0),
    "a class": lambda net: setattr(net.inner[0], "__class__", Other),
    "a forward": lambda net: setattr(net.inner[0], "forward", lambda x: x),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_shows_and_the_same_again_does_not(change: Any) -> None:
    net = Net()
    owners = Owners([net], [])
    before = owners.form()
    assert owners.form() is before
    change(net)
    after = owners.form()
    assert after != before
    assert owners.form() == after


def test_what_has_changed_back_is_known_again() -> None:
    net = Net()
    owners = Owners([net], [])
    training = owners.form()
    net.eval()
    owners.form()
    net.train()
    assert owners.form() == training
    assert hash(owners.form()) == hash(training)


def test_a_tensor_among_the_values_is_looked_at_each_time() -> None:
    net: Any = Net()
    net.mask = torch.ones(4)
    owners = Owners([net], [])
    before = owners.form()
    net.mask.data = torch.zeros(4)
    assert owners.form() != before


def test_an_unchanged_model_is_not_described_again() -> None:
    owners = Owners([Net()], [])
    owners.form()
    with patch.object(Owners, "_values", side_effect=AssertionError):
        owners.form()
