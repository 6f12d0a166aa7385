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
from accel.guard.together import OutOfStep, why_not_together
from accel.strategies.autocast_bf16 import AutocastBf16
from accel.strategies.base import Exactness
from tests.accel import loops
from tests.process_group import group_of_one

distributed = pytest.importorskip("torch.distributed")
CPU = torch.device("cpu")
SPREAD = "the model is sharded (FSDP, tensor parallel), which replays can't compare"
SHARDED = "the model is sharded (FSDP2), and gathers its weights in each call"


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
@pytest.mark.parametrize(
    ("make", "touches", "why"), [(fully_sharded, {"model"}, SHARDED), (tensor_parallel, {"model", "shards"}, SPREAD)]
)
def test_strategies_of_the_model_do_not_apply(
    monkeypatch: pytest.MonkeyPatch, make: Any, touches: set[str], why: str
) -> None:
    monkeypatch.setattr(strategies, "REGISTRY", [AutocastBf16])  # others may take their time on a busy machine
    monkeypatch.setattr(AutocastBf16, "touches", frozenset(touches))
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
    assert (row.status, row.why) == ("not applicable", why), report


@pytest.mark.usefixtures("group")
def test_a_rank_that_fails_while_all_make_a_call_again_can_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(strategies, "REGISTRY", [AutocastBf16])
    monkeypatch.setattr(guard, "called", failing)
    loops.play_clock(monkeypatch.setattr)
    model = fully_sharded()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batches: Any = [torch.randn(4, 3)] * 100
    model, batches = accel.optimize(model, batches, budget=60, enable=("autocast_bf16",), cache=False)

    def train() -> None:
        for x in batches:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    with pytest.raises(OutOfStep, match="OutOfMemoryError: no room; name the strategy in disable="):
        train()
    accel.undo(model)


@pytest.mark.usefixtures("group")
def test_calls_that_replays_would_not_leave_without_a_trace_are_not_made_again() -> None:
    model: Any = fully_sharded()
    assert why_not_together(model) == ""
    model.set_requires_gradient_sync(False)
    assert why_not_together(model).startswith("the last backward pass of a step exchanges no gradients")
    model.set_requires_gradient_sync(True)
    model.set_all_reduce_hook(lambda gradient: None)
    assert why_not_together(model).startswith("a hook of the loop's reduces the sharded model's gradients")
    model = fully_sharded()
    model[0].weight.register_post_accumulate_grad_hook(lambda weight: None)  # an update, say
    assert why_not_together(model).startswith("hooks of the loop's act on each gradient")
    assert why_not_together(tensor_parallel()) == SPREAD


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
