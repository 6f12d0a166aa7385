"""The device's limits as this process can reach them: a large matrix product per dtype, a large copy.

Measured and not looked up: a container's cores, a power limit or a slow BLAS are part of the machine. The best of a few
repetitions counts, for other processes can only make one slower.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from accel.profiler.evidence import Evidence, Roofline

_MIB = 1 << 20
_RUN_S = 0.03
"""For which a product or a copy is repeated."""


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """Sizes of the measurement for a kind of device."""

    sides: tuple[int, ...]
    """Of the square products: they grow until the next is expected to take longer than `product_s`."""
    product_s: float
    copy_bytes: int
    """Of each of the copy's two buffers; larger than the cache."""


# float16 has no fast product on most CPUs (3 GFLOP/s) and ends with a side of 256. A core complex has 32 MiB of cache.
_CPU = _Scale(sides=(128, 256, 512, 1024, 2048), product_s=0.02, copy_bytes=64 * _MIB)
# An H200 has 50 MiB of cache; it copies 4.1 TB/s by this.
_GPU = _Scale(sides=(1024, 2048, 4096, 8192), product_s=0.05, copy_bytes=512 * _MIB)


def measure(device: torch.device, dtypes: Sequence[torch.dtype], *, threads: int | None = None) -> Roofline:
    """Return the achieved GFLOP/s of a large product in each dtype, and the GB/s of a large copy.

    Takes 0.3 s for one dtype on two cores and 0.1 s for another; what the process has measured before is not measured
    again. On a GPU, float32 is measured with TF32 as it is set at the first call. Random state, default dtype and
    autocast are left alone, the number of threads is restored, and the memory is freed.

    Args:
        device: what to measure.
        dtypes: which products; one that the device can't multiply is left out.
        threads: intra-op threads to measure a CPU with, default as many as are set.

    Raises:
        torch.OutOfMemoryError: if the device has no room for the matrices.
    """
    device = torch.device(device)
    count = (threads or torch.get_num_threads()) if device.type == "cpu" else 1
    with _undisturbed(device):
        rates = {str(dtype).removeprefix("torch."): _product(device, dtype, count) for dtype in dtypes}
        gb_per_s = _copy(device, count)
    return Roofline(gflops={dtype: rate for dtype, rate in rates.items() if rate > 0}, gb_per_s=gb_per_s)


def dtypes_of(evidence: Evidence) -> list[torch.dtype]:
    """Return those in which to measure products: on a GPU also the one in which most of the script's were."""
    names = ["float32", *(["float64"] if evidence.dtype == "float64" else [])]
    products = evidence.trace.dtypes if evidence.trace is not None and evidence.device == "cuda" else {}
    names += sorted(products, key=lambda name: products[name])[-1:]
    kinds = (getattr(torch, name, None) for name in dict.fromkeys(names))
    return [kind for kind in kinds if isinstance(kind, torch.dtype)]


@functools.cache
def _product(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    """Return the GFLOP/s of a square product, 0 if the device can't multiply this dtype."""
    scale = _scale(device)
    try:
        for side in scale.sides:
            names = _matrices(device, dtype, side)
            once_s = _timer("mm(left, right, out=out)", names, device, 1).timeit(1).median
            if 8 * once_s > scale.product_s:
                break
        return 2 * side**3 / _shortest_s("mm(left, right, out=out)", names, device, threads) / 1e9
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # no such product
        return 0.0


def _scale(device: torch.device) -> _Scale:
    return _CPU if device.type == "cpu" else _GPU


def _matrices(device: torch.device, dtype: torch.dtype, side: int) -> dict[str, Any]:
    # No random numbers, but no constant either: a GPU multiplies those with less power, and faster.
    values = torch.arange(side * side, dtype=torch.float32, device=device).remainder_(17).sub_(8).div_(8)
    left = values.reshape(side, side).to(dtype)
    return {"mm": torch.mm, "left": left, "right": left.clone(), "out": torch.empty_like(left)}


@functools.cache
def _copy(device: torch.device, threads: int) -> float:
    """Return the GB/s of a copy, read plus written."""
    size = _scale(device).copy_bytes
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    names = {"source": source, "target": target}
    return 2 * size / _shortest_s("target.copy_(source)", names, device, threads) / 1e9


def _shortest_s(statement: str, names: dict[str, Any], device: torch.device, threads: int) -> float:
    """Return the shortest time with one thread and with all, s.

    Threads wait for each other: where another process has one of the cores, a product of two threads takes two time
    slices, 16 ms, even if it is 0.1 ms of work, and one thread alone reaches more.
    """
    timers = (_timer(statement, names, device, count) for count in sorted({1, threads}))
    return float(min(min(timer.blocked_autorange(min_run_time=_RUN_S).times) for timer in timers))


def _timer(statement: str, names: dict[str, Any], device: torch.device, threads: int) -> Any:
    from torch.utils import benchmark

    # The default clock waits for a GPU, and would start CUDA in a process that trains on a CPU.
    clock: dict[str, Any] = {"timer": time.perf_counter} if device.type == "cpu" else {}
    return benchmark.Timer(statement, globals=names, num_threads=threads, **clock)


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Disable autocast and gradients, and free the memory afterwards."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        reserved = 0
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            reserved = torch.cuda.memory_reserved(device)
        try:
            yield
        finally:
            # Only if this took memory from the driver: it frees the script's cached blocks, too.
            if device.type == "cuda" and torch.cuda.memory_reserved(device) > reserved:
                torch.cuda.empty_cache()
