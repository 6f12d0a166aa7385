"""The measured limits: plausible, cached, and nothing else in the process moves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from accel.profiler.trace import roofline
from accel.profiler.trace.roofline import measure

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _measured_afresh_and_small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(roofline, "_CPU", replace(roofline._CPU, sides=(64, 128), copy_bytes=1 << 20))
    monkeypatch.setattr(roofline, "_GPU", replace(roofline._GPU, sides=(1024, 2048), copy_bytes=64 << 20))
    for cached in (roofline._product, roofline._copy):
        cached.cache_clear()
    yield
    for cached in (roofline._product, roofline._copy):
        cached.cache_clear()


def test_each_dtype_has_its_rate() -> None:
    limits = measure(CPU, [torch.float32, torch.float64])

    assert limits.gflops.keys() == {"float32", "float64"}
    assert all(0.001 < rate < 1e6 for rate in limits.gflops.values())
    assert 0.01 < limits.gb_per_s < 1e5


def test_a_product_is_no_faster_than_its_time_says() -> None:
    """The rate is 2·n³ over a time that a stopwatch around the same product can't beat by much."""
    names = roofline._matrices(CPU, torch.float32, 128)
    watched = []
    for _ in range(200):
        start = time.perf_counter()
        names["mm"](names["left"], names["right"], out=names["out"])
        watched.append(time.perf_counter() - start)

    assert measure(CPU, [torch.float32]).gflops["float32"] < 3 * 2 * 128**3 / min(watched) / 1e9


def test_a_dtype_that_cannot_be_multiplied_is_left_out() -> None:
    assert measure(CPU, [torch.bool, torch.float32]).gflops.keys() == {"float32"}


def test_what_was_measured_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = measure(CPU, [torch.float32], threads=1)
    monkeypatch.setattr(roofline, "_shortest_s", lambda *_: 1.0)

    assert measure(CPU, [torch.float32], threads=1) == first
    assert measure(torch.device("cpu"), [], threads=1) == replace(first, gflops={})
    assert measure(CPU, [torch.float64], threads=1).gflops == {"float64": pytest.approx(2 * 128**3 / 1e9)}
    assert measure(CPU, [torch.float32], threads=2).gb_per_s == pytest.approx(2 * (1 << 20) / 1e9)


def test_sides_grow_until_the_next_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_CPU", replace(roofline._CPU, sides=(16, 32, 64), product_s=0.0))
    assert _side_of(monkeypatch) == [16]
    monkeypatch.setattr(roofline, "_CPU", replace(roofline._CPU, product_s=60.0))
    roofline._product.cache_clear()
    assert _side_of(monkeypatch) == [16, 32, 64]


def _side_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sides of the products that are measured."""
    sides: list[int] = []
    make = roofline._matrices
    with monkeypatch.context() as patched:
        patched.setattr(
            roofline, "_matrices", lambda device, dtype, side: sides.append(side) or make(device, dtype, side)
        )
        measure(CPU, [torch.float32], threads=1)
    return sides


def test_nothing_in_the_process_moves() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    state = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        limits = measure(CPU, [torch.float32], threads=1)
        assert torch.is_autocast_enabled("cpu")

    assert limits.gflops.keys() == {"float32"}
    assert torch.equal(torch.get_rng_state(), state)
    assert (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()) == (torch.float64, 2, True)


@pytest.mark.gpu
def test_a_gpus_limits() -> None:
    device = torch.device("cuda")
    torch.empty(1, device=device)
    before = torch.cuda.memory_allocated(device)
    state = torch.cuda.get_rng_state(device)
    limits = measure(device, [torch.float32, torch.bfloat16])

    assert limits.gflops["bfloat16"] > limits.gflops["float32"] > 100
    assert limits.gb_per_s > 50
    assert torch.cuda.memory_allocated(device) == before
    assert torch.equal(torch.cuda.get_rng_state(device), state)
