"""On a GPU compiled code draws as the device does: it is compared with eager calls that do so, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import entry, strategies
from accel.guard.guard import Comparison
from accel.run import Run
from accel.run.gate import Call
from accel.strategies.base import Exactness
from tests.accel.guard_replays import Acting

PLAN: dict[str, Any] = {"compiling": None}


class Transposed(nn.Module):
    """Drops in another order of memory, as `nn.TransformerEncoderLayer(batch_first=True)` does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return dropout(self.layer(x).t(), 0.5, self.training).t()


class Compiling(Acting):
    """Makes a call out of the sight of modes, and draws as it comes."""

    name = "compiling"
    exactness = Exactness.REORDERED
    factor = 1.0

    def enable(self, run: Run, setting: Any) -> None:
        run.gate.add(self.name, self._wrapped, compiles=True)

    def _wrapped(self, call: Call) -> Call:
        return lambda *args, **kwargs: call(*args, **kwargs) * self.factor


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], Comparison]:
    def check(on_gpu: bool) -> Comparison:
        monkeypatch.setattr(strategies, "REGISTRY", [Compiling])
        data: Any = DataLoader(TensorDataset(torch.randn(64, 6)), batch_size=8)
        model: Any = Transposed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, _, _ = accel.optimize(model, data, optimizer, budget=60, cache=False)
        guard = entry.MODELS[model].session.events.calls.check
        monkeypatch.setattr(Run, "cuda", on_gpu)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        guard.expect(PLAN)
        guard.recorded((torch.randn(8, 6),), {}).square().mean().backward()
        guard.check(PLAN)
        finding = guard.take_finding()
        monkeypatch.setattr(Run, "cuda", False)
        accel.undo(model)
        assert finding is not None
        return finding

    return check


def test_masks_by_layout_and_dtype_are_no_wrong_result(checked: Callable[[bool], Comparison]) -> None:
    assert checked(True).problem == ""
    assert "off by" in checked(False).problem  # on a CPU compiled code draws in the guard's own order


def test_a_call_that_can_not_be_made_again_is_no_wrong_result(
    checked: Callable[[bool], Comparison], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def forward(model: Transposed, x: Tensor) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("it can be called once")
        return model.layer(x)

    monkeypatch.setattr(Transposed, "forward", forward)
    finding = checked(True)
    assert finding.problem == ""
    assert finding.unsure == "the call can't be replayed without the compiler: it can be called once"


def test_a_wrong_result_is_found(checked: Callable[[bool], Comparison], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiling, "factor", 1.1)
    assert "off by" in checked(True).problem
