"""A module with a call in its slot stays a plain one to whoever copies it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from accel.profiler.loop import callslot


@pytest.fixture
def module() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    callslot.fill(module, callslot.SlotCall(lambda *args: "the call in the slot"))
    return module


def test_a_call_takes_the_modules_place_and_goes(module: nn.Module) -> None:
    x = torch.ones(1, 2)
    assert module(x) == "the call in the slot"
    callslot.restore(module, {})
    assert torch.equal(module(x), module[0](x))  # type: ignore[index]


def test_a_data_parallel_replica_runs_itself(module: nn.Module) -> None:
    """Each device has a replica with weights of its own, which a call bound to the module would pass over."""
    replica = module._replicate_for_data_parallel()
    replica._modules["0"] = nn.Linear(2, 3)
    assert replica(torch.ones(1, 2)).shape == (1, 3)
    assert module(None) == "the call in the slot"


def test_a_replica_keeps_a_compiled_call_that_is_not_ours(module: nn.Module) -> None:
    callslot.fill(module, lambda *args: "compiled")
    assert module._replicate_for_data_parallel()(None) == "compiled"


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_plain(module: nn.Module, copied: object) -> None:
    assert copied(module)(torch.ones(1, 2)).shape == (1, 2)  # type: ignore[operator]
