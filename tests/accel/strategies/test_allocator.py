"""Freed memory stays with the process while the strategy is on, and goes back to the system when it is off."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel.strategies import allocator
from accel.strategies.allocator import Allocator, mmap_threshold


def run_of(device: str = "cpu") -> Any:
    return SimpleNamespace(device=torch.device(device))


pytestmark = pytest.mark.skipif(bool(allocator._refusal()), reason=f"not applicable here: {allocator._refusal()}")


def test_large_requests_come_from_the_heap_while_it_is_on() -> None:
    libc, strategy = allocator._libc(), Allocator()
    blocks: list[int] = []

    def is_mapped() -> bool:
        """Tell whether a block is mapped that is larger than any before, none of which is free; no page is touched."""
        blocks.append(libc.malloc((64 + len(blocks)) << 20))
        return allocator._is_mapped(blocks[-1])

    try:
        assert is_mapped()
        for _ in range(2):
            strategy.enable(run_of(), None)
            assert not is_mapped()
            strategy.disable(run_of())
            assert is_mapped()
        strategy.close(run_of())
    finally:
        for block in blocks:
            libc.free(block)


def test_the_thresholds_are_those_that_were_found(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(allocator, "_set", lambda parameter, value: calls.append((parameter, value)))
    strategy = Allocator()
    strategy.enable(run_of(), None)
    assert calls == [(-4, 0), (-1, 2**31 - 1)]
    strategy.disable(run_of())
    ((mmap, trim),) = allocator._thresholds
    assert calls[2:] == [(-3, mmap), (-1, trim), (-4, 65536)]


def test_thresholds_are_those_of_before() -> None:
    strategy = Allocator()
    strategy.enable(run_of(), None)
    strategy.disable(run_of())
    # What lies free at the end of the heap serves larger requests, too.
    assert mmap_threshold() >= allocator._thresholds[0][0]


@pytest.mark.parametrize("first_leaves", [False, True])
def test_it_stays_on_for_the_model_that_keeps_it(first_leaves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one finds nothing to win, as it is on already, and is undone."""
    libc, first, second = allocator._libc(), Allocator(), Allocator()
    trimmed: list[int] = []

    class Noted:
        def __getattr__(self, name: str) -> Any:
            return trimmed.append if name == "malloc_trim" else getattr(libc, name)

    monkeypatch.setattr(allocator, "_libc", Noted)
    blocks: list[int] = []

    def is_mapped() -> bool:
        blocks.append(libc.malloc((64 + 128 * len(blocks)) << 20))
        return allocator._is_mapped(blocks[-1])

    first.enable(run_of(), None)
    second.enable(run_of(), None)
    leaves, stays = (first, second) if first_leaves else (second, first)
    leaves.disable(run_of())
    leaves.close(run_of())
    try:
        assert not is_mapped()
        assert trimmed == []
        assert leaves.refusal(run_of()) == "it is on already, for another model of this process"
        assert stays.refusal(run_of()) == ""
    finally:
        stays.disable(run_of())
    stays.close(run_of())
    assert is_mapped()
    assert trimmed == [0]
    for block in blocks:
        libc.free(block)


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
