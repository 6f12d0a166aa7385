"""Whole steps of Swin as graphs, in the small and on a CPU: a way that is wrong or fails is not timed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks import swin_training
from benchmarks.gpu import swin_graphs as bench


class Played(swin_training.Trainer):
    """Trains a small layer in a few ms of its own clock."""

    def __init__(self, ms: float, loss: float = 1.0) -> None:
        self.ms, self.loss = ms, loss

    def losses(self, steps: int) -> list[float]:
        return [self.loss] * steps

    def turn_ms(self, steps: int) -> float:
        return self.ms


def played(found: dict[str, Callable[[], Played]]) -> Callable[[str], Played]:
    return lambda way: found.get(way, lambda: Played(10.0))()


def test_what_fails_or_is_wrong_is_told_and_the_rest_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Played:
        raise RuntimeError("no graph")

    found = {
        "both, captured": lambda: Played(4.0),
        "fused, captured": fails,
        "compile, captured": lambda: Played(5.0, 1.02),
    }
    monkeypatch.setattr(bench, "trainer", played(found))
    figures = dict(bench.everything())
    assert set(figures["step_ms"]) == {"both, captured", "compile", "reduce-overhead"}
    assert figures["speedup"] == {
        "both, captured over compile": [2.5, 2.5, 2.5],
        "both, captured over reduce-overhead": [2.5, 2.5, 2.5],
    }
    assert figures["failed_ways"] == {
        "fused, captured": "RuntimeError: no graph",
        "compile, captured": "RuntimeError: losses are 2.0% apart from those of eager steps",
    }


def test_a_captured_step_trains_as_an_ordinary_one() -> None:
    def losses(captured: bool) -> list[float]:
        torch.manual_seed(0)
        made = swin_training.Trainer(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 1000)), 2, 8, "cpu")
        if captured:
            bench.captured(made, strict=False)
        return made.losses(6)

    with pytest.warns(RuntimeWarning, match="must be on one CUDA device"):  # there it runs as it is, and says so
        found = losses(captured=True)
    assert found == losses(captured=False)
