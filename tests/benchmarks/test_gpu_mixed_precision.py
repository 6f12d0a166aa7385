"""The race of mixed precision, played on a CPU: losses near float32's, or nothing is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import mixed_precision as race
from benchmarks.gpu.targets import judged
from benchmarks.spread import Spread


def timed(step: Callable[[], Any]) -> Spread:
    assert isinstance(step(), Tensor)
    return Spread(1.0, 1.0, 1.0)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "STEPS", 4)


def test_other_losses_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([1.0, 1.04, 1.06])
    monkeypatch.setattr(race, "Job", lambda size, device: None)
    monkeypatch.setattr(race, "in_float32", lambda job, dtype: None)
    monkeypatch.setattr(race, "WAYS", {name: lambda job, dtype: lambda: torch.zeros(()) for name in race.WAYS})
    monkeypatch.setattr(race, "lost", lambda step: next(losses))
    row = race.measured(torch.float16, "tiny", "cpu", timed, lambda: 100)
    assert row == {"failed": "O2: loss 1.0600, in float32 1.0000: nothing is timed"}


def test_the_worst_dtype_is_held_to_the_targets() -> None:
    rows = [{"dtype": "float16", "speedup": 1.3, "memory": 0.8}, {"dtype": "bfloat16", "speedup": 1.1, "memory": 0.9}]
    found = {row["line"]: (row["found"], row["met"]) for row in _judged(rows)}
    assert found["BERT-base at O2 over autocast, both dtypes"] == (1.1, False)
    assert found["BERT-base at O2: memory of autocast's"] == (0.9, True)
    found = {row["line"]: (row["found"], row["met"]) for row in _judged([*rows, {"dtype": "x", "failed": "why"}])}
    assert found["BERT-base at O2 over autocast, both dtypes"] == (None, None)


def _judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return judged({"mixed_precision": {"rows": rows}}, green=True)
