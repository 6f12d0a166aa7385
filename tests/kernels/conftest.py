"""Kernels in Triton's interpreter, and memory that is poisoned until it is written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from accel.kernels import support


@pytest.fixture
def interpreted() -> Iterator[None]:
    """CPU tensors run the Triton kernels."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here; the interpreter is for machines without a GPU")
    if not support.has_triton():
        pytest.skip("needs triton, which is not installed")
    with support.interpreted():
        yield


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Uninitialised memory reads as NaN, or as the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
