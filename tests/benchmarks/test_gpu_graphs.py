"""The race of captured steps, played on a CPU: the same losses, or nothing is timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from accel.graphs import CapturedStep, ModelCalls
from benchmarks.gpu import graphs
from benchmarks.spread import Spread
from tests.accel.graphs.tape import TapeRecorder


def timed(step: Callable[[], Any]) -> Spread:
    step()
    return Spread(1.0, 1.0, 1.0)


@pytest.fixture(autouse=True)
def _on_a_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CapturedStep, "_made", lambda step, inputs: TapeRecorder())
    capture = import_module("accel.graphs.capture")
    monkeypatch.setattr(capture, "ModelCalls", partial(ModelCalls, recorder=lambda device: TapeRecorder()))
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    # AdamW reads its step count on the host here; on a GPU the race has it do so on the device.
    monkeypatch.setattr(torch.optim, "AdamW", lambda params, **options: torch.optim.SGD(params, 0.01, foreach=False))


@pytest.mark.parametrize("model", ["mlp", pytest.param("transformer", marks=pytest.mark.slow)])
def test_captured_steps_lose_what_eager_ones_lose(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "STEPS", 6)
    row = graphs.measured(model, "cpu", timed)
    assert row["speedup"] == {"eager": 1.0, "model": 1.0, "reduce-overhead": 1.0, "step, reduce-overhead": 1.0}
    assert row["loss_apart"] == 0
    assert "graph by hand" in row["failed_rivals"]  # there is no CUDA graph here


def test_another_loss_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "STEPS", 3)
    captured = graphs.capture

    def capture(step: Any, strict: bool) -> Any:
        return captured(step) if isinstance(step, torch.nn.Module) else lambda x, target: step(x, target) + 1

    monkeypatch.setattr(graphs, "capture", capture)
    with pytest.raises(RuntimeError, match=r"captured: losses are 1\.0e\+00 apart: nothing is timed"):
        graphs.measured("mlp", "cpu", timed)
