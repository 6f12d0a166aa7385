"""Whole processes against each other: models of the suite train, and turns are A B B A."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch

from benchmarks import end_to_end
from benchmarks.end_to_end import compare, in_a_process, train
from benchmarks.suite import MODELS

# By default those with what the others lack: a discriminator beside, clipping, targets that are assigned.
FEW = {"gan", "lstm", "fcos3d", "ncf"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FEW else pytest.mark.slow) for n in MODELS])
def test_a_model_learns_by_heart(name: str) -> None:
    torch.manual_seed(0)
    model, loader, optimizer, loss, clip, beside = MODELS[name]("tiny")
    x, target = next(iter(loader))
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        value = loss(model(x), target)
        value.backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if beside is not None:
            beside(target)
        losses.append(value.item())
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]


def test_training_ends_in_time_with_its_steps() -> None:
    found = train(MODELS["ncf"]("tiny"), time.time() + 0.5, None)
    assert found["steps"] > 0
    assert found["kept"] == []


def test_pairs_go_a_b_b_a_and_steps_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str | None] = []

    def process(name: str, seconds: float, allow: str | None) -> dict[str, Any]:
        ran.append(allow)
        steps = 100 + len(ran)
        return {"steps": 2 * steps, "kept": ["fused_optimizer"]} if allow else {"steps": steps, "kept": []}

    monkeypatch.setattr(end_to_end, "in_a_process", process)
    row = compare("ncf", 60, 4, "exact")
    assert ran == [None, "exact", "exact", None, None, "exact", "exact", None]
    assert row["low"] <= row["ratio"] <= row["high"]
    assert row["ratio"] == pytest.approx(2, rel=0.02)
    assert row["kept"] == ["fused_optimizer"]


@pytest.mark.slow
@pytest.mark.parametrize("allow", [None, "reordered"])
def test_a_process_of_its_own(allow: str | None) -> None:
    assert in_a_process("ncf", 15, allow)["steps"] > 5
