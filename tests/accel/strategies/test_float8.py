"""The strategy that multiplies large linear layers in 8 bits, in torchao's emulation."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel.errors import InvalidArgument
from accel.exactness import Exactness, check_level
from accel.guard.comparison import Tolerance
from accel.kernels.dropins import DropIn
from accel.strategies import float8
from accel.strategies.float8 import Float8

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao; make integrations has it"
)
LIMITS = Tolerance.of(Exactness.FLOAT8, torch.float32)


def run_of(model: nn.Module, *, cuda: bool = False, twice: str = "") -> Any:
    device = torch.device("cuda" if cuda else "cpu")
    return SimpleNamespace(model=model, cuda=cuda, device=device, observed=SimpleNamespace(needs_graphs=twice))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        narrowed: Tensor = self.narrow(F.gelu(self.wide(self.norm(x))))
        return x + narrowed


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "_LEAST", 64)


def trained(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    output = model(x)
    F.cross_entropy(output, torch.arange(len(x)) % output.shape[-1]).backward()  # type: ignore[no-untyped-call]
    return output.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def off(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@needs_torchao
@pytest.mark.parametrize(("depth", "rows"), [(1, 64), (12, 77)])
def test_it_stays_within_the_tolerance_of_its_level_and_goes_back(small: None, depth: int, rows: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), *(Block(64) for _ in range(depth)), nn.Linear(64, 10))
    run, strategy, x = run_of(model), Float8(), torch.randn(rows, 64)
    plain, gradients = trained(model, x)
    for _ in range(2):
        strategy.enable(run, None)
        output, own = trained(model, x)
        assert 0.005 < off(output, plain) <= LIMITS.output
        assert all(off(mine, theirs) <= LIMITS.gradient for mine, theirs in zip(own, gradients, strict=True))
        strategy.disable(run)
        assert torch.equal(trained(model, x)[0], plain)


@needs_torchao
def test_layers_keep_their_class_and_keys_and_the_last_one_its_product(small: None) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 24), nn.Linear(24, 64))
    keys = list(model.state_dict())
    Float8().enable(run_of(model), None)
    assert [isinstance(layer, DropIn) for layer in model] == [True, True, False, False]
    assert all(isinstance(layer, nn.Linear) for layer in model)
    assert list(model.state_dict()) == keys
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(type(layer) is nn.Linear for layer in copied)


def test_it_says_why_it_does_not_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    large = nn.Sequential(nn.Linear(2048, 2048, device="meta"), nn.Linear(2048, 10, device="meta"))
    assert "needs a CUDA device" in Float8().refusal(run_of(large))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "no 8-bit products" in Float8().refusal(run_of(large, cuda=True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install torchao" in Float8().refusal(run_of(large, cuda=True))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert "no gain on its shapes" in Float8().refusal(run_of(nn.Linear(4096, 4096, device="meta"), cuda=True))
    assert Float8().refusal(run_of(large, cuda=True)) == ""
    twice = run_of(large, cuda=True, twice="a backward pass keeps its graph")
    assert "differentiated once" in Float8().refusal(twice)


@pytest.mark.gpu
@needs_torchao
def test_it_runs_on_a_gpu() -> None:
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 8)).cuda()
    run, strategy, x = run_of(model, cuda=True), Float8(), torch.randn(77, 2048, device="cuda")
    if why := strategy.refusal(run):
        pytest.skip(why)
    plain = model(x)
    strategy.enable(run, None)
    output = model(x)
    output.sum().backward()
    assert 0.005 < off(output.detach(), plain.detach()) <= LIMITS.output


def test_the_level_is_between_reduced_and_lossy() -> None:
    assert Exactness.REDUCED < Float8.exactness < Exactness.LOSSY
    with pytest.raises(InvalidArgument, match="did you mean 'float8'"):
        check_level("allow", "fp8")
