"""Which path a call takes."""

from __future__ import annotations

import os

import pytest
import torch

from accel.kernels import support
from accel.kernels.support import Cost


def test_cpu_tensors_take_the_plain_path() -> None:
    assert not support.runs_triton(torch.zeros(1))


def test_within_interpreted_they_run_kernels(interpreted: None) -> None:
    assert support.runs_triton(torch.zeros(1))


def test_interpreting_must_be_asked_for_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(os.environ, "TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET must be 1"), support.interpreted():
        pass
    assert not support.runs_triton(torch.zeros(1))


def test_the_least_time_is_the_larger_limit() -> None:
    assert Cost(flops=2e9, bytes=1e9).seconds(1e12, 1e12) == pytest.approx(2e-3)
    assert Cost(flops=2e9, bytes=8e9).seconds(1e12, 1e12) == pytest.approx(8e-3)


def test_memory_that_nobody_wrote_is_poison() -> None:
    assert torch.empty(3).isnan().all()
