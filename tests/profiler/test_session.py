"""What a profiled run remembers of its steps once they are over."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel.profiler.gather import Exchange
from accel.profiler.session import ProfileSession


def train(session: ProfileSession, *, around: Any, within: Any = nullcontext, threads: int = 1) -> None:
    """Take twelve steps."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows: Any = torch.randn(48, 4)
    before = torch.get_num_threads()
    session.start()
    torch.set_num_threads(threads)
    try:
        with around():
            for x in DataLoader(rows, batch_size=4):
                optimizer.zero_grad()
                with within():
                    model(x).square().sum().backward()
                optimizer.step()
    finally:
        torch.set_num_threads(before)
        session.stop()


def profiled(**options: Any) -> ProfileSession:
    session = ProfileSession(confirm=False, trace_file=None, exchange=Exchange())
    train(session, **options)
    return session


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("where", ["around", "within"])
def test_anomaly_mode_of_the_steps_outlives_its_context(where: str) -> None:
    contexts: dict[str, Any] = {"around": nullcontext, where: torch.autograd.detect_anomaly}

    assert profiled(**contexts).evidence().anomaly_mode
    assert not torch.is_anomaly_enabled()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_outside_of_the_steps_is_none_of_theirs() -> None:
    session = profiled(around=nullcontext)
    with torch.autograd.detect_anomaly():
        assert not session.evidence().anomaly_mode


def test_threads_are_those_of_the_steps() -> None:
    before = torch.get_num_threads()

    assert profiled(around=nullcontext, threads=before + 2).evidence().threads == before + 2
    assert torch.get_num_threads() == before
