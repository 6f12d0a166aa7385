"""Freed memory stays with the process while the strategy is on, and goes back to the system when it is off."""

from __future__ import annotations

import ctypes
import resource
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel.strategies import allocator
from accel.strategies.allocator import Allocator, mmap_threshold


def run_of(device: str = "cpu") -> Any:
    return SimpleNamespace(device=torch.device(device))


pytestmark = pytest.mark.skipif(bool(allocator._refusal()), reason=f"not applicable here: {allocator._refusal()}")

MEGABYTES = 48
"""Of one tensor: more than glibc ever leaves to its heap by itself."""


def faults(times: int = 5) -> float:
    """Return how many pages are faulted in each time that tensors are made and freed."""
    for _ in range(2):
        torch.ones(MEGABYTES << 18)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.ones(MEGABYTES << 18)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / times


def test_pages_stay_while_it_is_on() -> None:
    plain, strategy = faults(), Allocator()
    pages = MEGABYTES << 8
    assert plain > 0.9 * pages
    for _ in range(2):
        strategy.enable(run_of(), None)
        try:
            assert faults() < 0.05 * pages
        finally:
            strategy.disable(run_of())
        assert faults() > 0.9 * pages


def test_the_threshold_is_where_requests_begin_to_be_mapped() -> None:
    threshold = mmap_threshold()
    assert 64 * 1024 <= threshold <= 32 * 1024 * 1024
    libc = allocator._libc()
    block = libc.malloc(33 << 20)
    try:
        assert allocator._is_mapped(block)
    finally:
        libc.free(block)


def test_thresholds_are_those_of_before() -> None:
    strategy = Allocator()
    strategy.enable(run_of(), None)
    assert strategy._thresholds is not None
    wanted = strategy._thresholds[0]
    strategy.disable(run_of())
    # What lies free at the end of the heap serves larger requests, too.
    assert mmap_threshold() >= wanted


def test_it_needs_a_model_on_the_cpu() -> None:
    assert Allocator().refusal(run_of("cuda")) == "the model's memory is not the CPU's but that of cuda"
    assert Allocator().refusal(run_of()) == ""


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_TRIM_THRESHOLD_", "1"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1")]
)
def test_what_the_user_has_set_stays(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert Allocator().refusal(run_of()) == f"{name} set the allocator's thresholds already"


def test_another_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Preloaded:
        malloc = ctypes.cast(1, ctypes.CFUNCTYPE(None))

    monkeypatch.setattr(allocator, "_libc", Preloaded)
    assert Allocator().refusal(run_of()).startswith("another allocator has been put in the place of glibc's")


def test_another_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("musl", "1"))
    assert Allocator().refusal(run_of()) == "the C library is not glibc"
