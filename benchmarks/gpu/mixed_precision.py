"""BERT-base trained at O2 by `accel.amp.decorate`, against torch's autocast: time of a step, most memory, same losses.

    python -m benchmarks.gpu.sections mixed_precision FILE

Each in float16, with a loss scale, and in bfloat16, without. Nothing is timed whose losses are not those of float32
within 5 %.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from accel.amp import decorate
from accel.optim import FusedAdamW
from benchmarks.gpu.device_times import launched
from benchmarks.gpu.rows import Figures, growing, tried
from benchmarks.render import Row
from benchmarks.suite import bert
from benchmarks.suite.workload import Size

STEPS = 20
"""Of which the last quarter's losses are compared."""
TOLERANCE = 0.05
"""Of the mean loss in float32."""
DTYPES = (torch.float16, torch.bfloat16)

Step = Callable[[], Tensor]


class Job:
    """The model and one batch, the same for each way to train it; without dropout, whose draws would differ."""

    def __init__(self, size: Size, device: str) -> None:
        torch.manual_seed(0)
        made = bert.make(size)
        self.model, self.loss, self.device = made.model.to(device), made.loss, device
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        batch: Any = next(iter(made.loader))
        self.x, self.target = (tensor.to(device) for tensor in batch)

    def optimizer(self) -> AdamW:
        """Return torch's fastest."""
        return AdamW(self.model.parameters(), 1e-4, fused=True)

    def loss_now(self) -> Tensor:
        """Return the loss of a forward pass."""
        return self.loss(self.model(self.x), self.target)


def plainly(job: Job, optimizer: torch.optim.Optimizer) -> Step:
    """Train as a loop does that knows nothing of precision."""

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = job.loss_now()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def in_float32(job: Job, dtype: torch.dtype) -> Step:
    """Train in float32."""
    return plainly(job, job.optimizer())


def under_autocast(job: Job, dtype: torch.dtype) -> Step:
    """Train as torch's recipe has it: autocast, and a scaler for float16."""
    optimizer = job.optimizer()
    scaler = torch.amp.GradScaler(job.device, enabled=dtype == torch.float16)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(job.device, dtype):
            loss = job.loss_now()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def at_o2(job: Job, dtype: torch.dtype) -> Step:
    """Train at O2, with the optimizer that does it in one pass."""
    optimizer = FusedAdamW(job.model.parameters(), lr=1e-4)
    decorate(job.model, optimizer, level="O2", dtype=dtype)
    return plainly(job, optimizer)


WAYS: dict[str, Callable[[Job, torch.dtype], Step]] = {"autocast": under_autocast, "O2": at_o2}


def lost(step: Step) -> float:
    """Return the mean of the last losses."""
    return float(torch.stack([step() for _ in range(STEPS)])[-STEPS // 4 :].float().mean())


def rows(size: Size = "full", device: str = "cuda") -> Iterator[Row]:
    """Yield a row for each dtype."""
    for dtype in DTYPES:
        yield tried({"dtype": str(dtype).removeprefix("torch.")}, partial(measured, dtype, size, device))


def measured(
    dtype: torch.dtype,
    size: Size,
    device: str,
    time: Callable[[Step], Any] = launched,
    most_bytes: Callable[[], int] = torch.cuda.max_memory_allocated,
) -> Row:
    """Time both in one dtype."""
    expected = lost(in_float32(Job(size, device), dtype))
    medians, memory, losses = {}, {}, {"float32": expected}
    for name, way in WAYS.items():
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        step = way(Job(size, device), dtype)
        losses[name] = lost(step)
        if not abs(losses[name] - expected) <= TOLERANCE * expected:
            return {"failed": f"{name}: loss {losses[name]:.4f}, in float32 {expected:.4f}: nothing is timed"}
        medians[name], memory[name] = time(step).median, most_bytes()
        del step
    return {
        "ms": medians,
        "bytes": memory,
        "losses": losses,
        "weights": "float32",  # of the model at O2; those of records before are 16-bit
        "speedup": medians["autocast"] / medians["O2"],
        "memory": memory["O2"] / memory["autocast"],
    }


def everything() -> Figures:
    """Measure; yield the rows so far."""
    yield from growing("rows", rows())
