"""The evidence on observed steps has their page faults, where the system counts them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel.profiler import page_faults
from accel.profiler.evidence import Evidence
from accel.profiler.loop.clock import StepClock
from accel.profiler.phases import Measurement
from accel.run import Run
from accel.run.gate import Gate
from accel.search.priority import faulting
from accel.session.observation import Observation


def observed(counts: list[Any]) -> Evidence:
    model = nn.Linear(6, 2)
    run = Run(model, DataLoader(TensorDataset(torch.randn(8, 6))), [], Gate(model, []), SimpleNamespace())  # type: ignore[arg-type]
    observation = Observation(StepClock(), run, lambda: 0)
    try:
        return observation.evidence(
            [Measurement(step=n, seconds=0.01, page_faults=count) for n, count in enumerate(counts)]
        )
    finally:
        observation.close()


def test_a_typical_step_s_faults_and_what_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_faults, "cost_s", lambda: 2e-6)
    evidence = observed([90_000, 1000, 1000])  # the first one warms up
    assert (evidence.page_faults, evidence.page_fault_s) == (1000, 2e-6)
    assert faulting(evidence) == pytest.approx(0.2)


@pytest.mark.parametrize(("counts", "cost_s"), [([0, 0], None), ([5, 5], None), ([None, None], 2e-6), ([], 2e-6)])
def test_where_faults_are_not_counted_their_share_is_not_known(
    counts: list[Any], cost_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_faults, "cost_s", lambda: cost_s)
    evidence = observed(counts)
    assert evidence.page_faults is None
    assert faulting(evidence) is None
