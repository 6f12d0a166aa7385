"""A capture that runs out of memory: all of it is given back before the eager call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from accel.graphs.capture import CapturedStep
from accel.graphs.model_calls import ModelCalls
from accel.graphs.owners import Owners
from tests.accel.graphs.model_loops import batch
from tests.accel.graphs.tape import TapeGraph, TapeRecorder

pytestmark = pytest.mark.filterwarnings("ignore:accel.graphs.capture:RuntimeWarning")
_T = TypeVar("_T")


class Full(TapeRecorder):
    """Runs out of memory at the end of one of its recordings."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def record(self, run: Callable[[], _T]) -> tuple[TapeGraph, _T]:
        """Record, and keep no graph: what was recorded lives as long as accel holds it."""
        made = super().record(run)
        self.graphs.clear()
        self.at -= 1
        if self.at == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made


class Watched(nn.Linear):
    """Has references to its outputs, which hold nothing."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.outputs = list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        """Apply."""
        out = super().forward(x)
        self.outputs.append(weakref.ref(out))
        return out


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Watched | bool]]:
    """Whether outputs were alive when memory was given back; the first item is the model. No garbage is collected."""
    model = Watched()
    seen: list[Watched | bool] = [model]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: seen.append(any(each() is not None for each in model.outputs))
    )
    gc.disable()
    yield seen
    gc.enable()


@pytest.mark.parametrize("at", [1, 2], ids=["forward", "backward"])
def test_a_models_capture(given_back: list[Any], at: int) -> None:
    model = given_back[0]
    calls = ModelCalls(model, warmup=1, recorder=lambda device: Full(at))
    run = calls.wrap(model._call_impl)
    for seed in range(3):
        run(batch(8, seed)).sum().backward()
    assert given_back[1:] == [False]
    assert "OutOfMemoryError: CUDA out of memory" in calls.why_eager[0]


def test_a_steps_capture(given_back: list[Any]) -> None:
    model = given_back[0]
    step = CapturedStep(lambda x: model(x), Owners([model], []), warmup=1, most=2, strict=False)
    step._recorder = Full(1)
    for seed in range(3):
        step(batch(8, seed))
    assert given_back[1:] == [False]
    assert "OutOfMemoryError: CUDA out of memory" in step.why_eager[0]


def test_another_failure_leaves_the_allocator_alone(given_back: list[Any]) -> None:
    model = given_back[0]
    calls = ModelCalls(model, warmup=1, recorder=lambda device: TapeRecorder())
    run = calls.wrap(lambda x: model._call_impl(x) * (2 if x.sum().item() > 1e9 else 1))
    for seed in range(3):
        run(batch(8, seed)).sum().backward()
    assert calls.why_eager
    assert given_back[1:] == []
