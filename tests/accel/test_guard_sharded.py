"""A model whose weights are spread over ranks is left alone: no rank can compare its gradients, or call it alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import strategies
from accel.guard import guard
from accel.guard.alone import is_sharded
from accel.strategies.autocast_bf16 import AutocastBf16
from accel.strategies.base import Exactness
from tests.accel import loops
from tests.process_group import group_of_one

distributed = pytest.importorskip("torch.distributed")
CPU = torch.device("cpu")
SHARDED = "the model is sharded (FSDP, tensor parallel), which replays can't compare"


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    with group_of_one(tmp_path):
        yield


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def fully_sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = net()
    mesh = distributed.init_device_mesh("cpu", (1,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel() -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    return parallelize_module(net(), distributed.init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("make", [fully_sharded, tensor_parallel])
def test_strategies_of_the_model_do_not_apply(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    monkeypatch.setattr(strategies, "REGISTRY", [AutocastBf16])  # others may take their time on a busy machine
    loops.play_clock(monkeypatch.setattr)
    loader: Any = DataLoader(TensorDataset(torch.randn(16, 3), torch.randn(16, 2)), batch_size=4)
    model = make()
    model, loader = accel.optimize(model, loader, budget=60, enable=("autocast_bf16",), cache=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(20):
        for x, target in loader:
            optimizer.zero_grad()
            (model(x) - target).square().mean().backward()
            optimizer.step()
    report = accel.explain(model)
    accel.undo(model)
    (row,) = report.rows
    assert (row.status, row.why) == ("not applicable", SHARDED), report


class Elsewhere(nn.Linear):
    """Computes with other tensors than its parameters, as FSDP's modules do."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.detach().requires_grad_(), self.bias)


def test_a_replay_in_which_the_gradients_that_arrived_reach_nothing_compares_nothing() -> None:
    model = Elsewhere(3, 2, bias=False)
    x = torch.randn(4, 3)
    recording = guard.record(model, CPU, (x,), {})
    outputs = model(x)
    recording.listen(outputs)
    outputs.sum().backward()
    plain, candidate = guard.replay(model, model, recording), guard.replay(model, model, recording)
    finding = guard.compare(plain, candidate, Exactness.REORDERED)
    assert finding.unsure == "gradients arrived at the outputs, and none of them reaches a parameter or an input"
    assert not finding.problem


def test_without_a_process_group_no_module_is_looked_at() -> None:
    """It is asked for each strategy at each look at a plan: 1,000 modules take some ms."""
    from torch.distributed.fsdp import FSDPModule

    class Sharded(nn.Linear, FSDPModule):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return nn.Linear.__new__(cls)

        def modules(self) -> Any:
            raise AssertionError("they are gone through")

    assert not is_sharded(Sharded(2, 2))
