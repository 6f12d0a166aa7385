"""What a device can do at best: copies, matrix products in each precision, transfers from the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.rows import Figures

RUNS = 5
"""Of which the shortest counts: nothing makes one too short."""


def everything(device: str = "", side: int = 0, megabytes: int = 0) -> Figures:
    """Measure the device at hand: yield GB/s of a copy, TFLOP/s of products, GB/s from the host's memory."""
    is_gpu = torch.cuda.is_available()
    device = device or ("cuda" if is_gpu else "cpu")
    side, megabytes = side or (8192 if is_gpu else 512), megabytes or (2048 if is_gpu else 16)
    source = torch.ones(megabytes << 18, device=device)
    target = torch.empty_like(source)
    yield "copy_gb_per_s", 2 * source.nbytes / shortest_s(lambda: target.copy_(source), device) / 1e9
    tflops: dict[str, float] = {}
    for name in ("fp32", "tf32", "bf16", "fp8"):
        if is_gpu or name in ("fp32", "bf16"):
            try:
                tflops[name] = 2 * side**3 / product_s(name, side, device) / 1e12
            except (RuntimeError, AttributeError) as error:
                yield f"failed_{name}", str(error)[:200]
    yield "tflops", tflops
    if is_gpu:
        yield "from_host_gb_per_s", {name: from_host(name == "pinned", target) for name in ("pinned", "pageable")}


def shortest_s(call: Callable[[], Any], device: str, repeats: int = 4) -> float:
    """Return the seconds of a call, the shortest of some runs of several."""
    seconds = []
    for _ in range(RUNS):
        _wait(device)
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        _wait(device)
        seconds.append((time.perf_counter() - began) / repeats)
    return min(seconds)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def product_s(name: str, side: int, device: str) -> float:
    """Return the seconds of a square product of random numbers: zeros would take less power, and time."""
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    if name == "fp8":
        one = torch.ones((), device=device)
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        return shortest_s(lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16), device)
    if name == "bf16":
        a, b = a.bfloat16(), b.bfloat16()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        return shortest_s(lambda: a @ b, device)
    finally:
        torch.set_float32_matmul_precision(before)


def from_host(pinned: bool, target: Tensor) -> float:
    """Return the GB/s of a copy from the host's memory, of a batch's size."""
    part = target[: 64 << 18]
    source = torch.ones(part.shape, pin_memory=pinned)
    return part.nbytes / shortest_s(lambda: part.copy_(source, non_blocking=pinned), "cuda") / 1e9
