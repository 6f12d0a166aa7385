"""How much of the copy to a GPU hides behind the step: batches copied one ahead, against others and against no copy.

    python -m benchmarks.gpu.sections copy_overlap FILE

The step is matrix products long enough to hide the copy. `on the device` has its batches there already: the floor. Runs
as part of `make gpu`.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from accel.dataio.loader import ContinuousLoader
from benchmarks.gpu.rows import Figures
from benchmarks.render import Row
from benchmarks.spread import extremes, ratios

WORKERS = 4
"""Two made a batch of 50 MB in 32 ms each: the step of 11 ms waited for batches, not for copies."""

Batches = Callable[[], Iterable[tuple[Tensor, Tensor]]]


def _data(batch: int, batches: int) -> TensorDataset:
    return TensorDataset(torch.randn(batch * batches, 3, 128, 128), torch.zeros(batch * batches, dtype=torch.int64))


def _on_device(loader: DataLoader[Any]) -> Batches:
    kept = [(images.cuda(), labels.cuda()) for images, labels in loader]
    return lambda: kept


def _copied(loader: DataLoader[Any], non_blocking: bool) -> Batches:
    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in loader:
            yield images.cuda(non_blocking=non_blocking), labels.cuda(non_blocking=non_blocking)

    return batches


def _timm(loader: DataLoader[Any]) -> Batches | None:
    try:
        kind = importlib.import_module("timm.data.loader").PrefetchLoader
    except (ImportError, RuntimeError):
        return None
    # Its normalisation is part of it: mean 0 and deviation 1 leave the batch as it is.
    prefetching = kind(loader, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), channels=3)
    return lambda: prefetching


def ways(batch: int, batches: int) -> dict[str, Batches]:
    """Return the ways to get batches to the device, by name."""
    data = _data(batch, batches)

    def loader(pinned: bool) -> DataLoader[Any]:
        return DataLoader(data, batch, num_workers=WORKERS, persistent_workers=True, pin_memory=pinned)

    ahead = ContinuousLoader(DataLoader(data, batch), mode="threads", num_workers=WORKERS, device="cuda")
    found: dict[str, Batches | None] = {
        "on the device": _on_device(DataLoader(data, batch)),
        "plain": _copied(loader(False), non_blocking=False),
        "pin_memory, non_blocking": _copied(loader(True), non_blocking=True),
        "timm PrefetchLoader": _timm(loader(True)),
        "continuous, one ahead": lambda: ahead,
    }
    return {name: way for name, way in found.items() if way is not None}


def step_ms(way: Batches, work: Tensor, products: int) -> float:
    """Return milliseconds per step over one epoch; the first three steps are not counted."""
    began, steps = 0.0, 0
    for steps, (images, _) in enumerate(way()):
        if steps == 3:
            torch.cuda.synchronize()
            began = time.perf_counter()
        result = work
        for _ in range(products):
            result = result @ work
        images.mul_(1.0 + 0.0 * result[0, 0])  # the step uses the batch, and waits for it
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3 / (steps - 2)


def overlap(batch: int = 256, batches: int = 40, turns: int = 7) -> Iterator[dict[str, Any]]:
    """Yield, after each turn, for each way the step's time as a ratio of the floor, with its spread over turns."""
    work = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64
    found = ways(batch, batches)
    bytes_per_batch = batch * 3 * 128 * 128 * 4
    products = _enough(work, bytes_per_batch)
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(turns):
        for name, way in found.items():
            times[name].append(step_ms(way, work, products))
        yield {"batch_bytes": bytes_per_batch, "products": products, "asked": 1.02, "ways": _rows(times)}


def _rows(times: dict[str, list[float]]) -> dict[str, Row]:
    floor = times["on the device"]
    return {
        name: {
            "step_ms": statistics.median(taken),
            **extremes(ratios(taken, floor)).named("ratio", "low", "high"),
        }
        for name, taken in times.items()
    }


def _enough(work: Tensor, bytes_per_batch: int) -> int:
    """Return how many products take twice as long as copying a batch at 10 GB/s."""
    wanted_s = 2 * bytes_per_batch / 10e9
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            work @ work
        torch.cuda.synchronize()
    return max(1, round(wanted_s / ((time.perf_counter() - began) / 20)))


def everything() -> Figures:
    """Measure and yield the figures."""
    for figures in overlap():
        yield from figures.items()
