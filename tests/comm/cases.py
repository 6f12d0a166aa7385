"""What the ranks of the tests do. Nothing here asserts: ranks return what they found."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.compressor import Compressor, Exact
from accel.comm.dgc import DGC
from accel.comm.engine import gradient_engine
from accel.comm.half import Half
from accel.comm.hooks import CommState, hook
from accel.comm.int8 import Int8
from accel.comm.one_bit import OneBit
from accel.comm.powersgd import PowerSGD

SECONDS = timedelta(seconds=60)
"""Nothing waits for it: a rank that is late by this long on a busy machine is no fault."""


class OneBitTwice(OneBit):
    """Rounds values and sums, as more ranks than there are here do."""

    direct = 0


COMPRESSORS: dict[str, Callable[[], Compressor]] = {
    "exact": Exact,
    "fp16": lambda: Half(torch.float16),
    "bf16": Half,
    "int8": lambda: Int8(64),
    "1-bit": lambda: OneBit(64, exact_below=0),
    "1-bit twice": lambda: OneBitTwice(64, exact_below=200),
    "PowerSGD": lambda: PowerSGD(2, min_compression=0),
    "ACP-SGD": lambda: PowerSGD(2, min_compression=0, alternate=True),
    "DGC": lambda: DGC(0.05, momentum=False, exact_below=0),
}


class Given(nn.Module):
    """Parameters whose gradients are what `forward` is given."""

    # Scalars, odd sizes, one element, a size that is no multiple of any block, one larger than a bucket.
    SHAPES = ((7,), (33, 5), (1,), (64, 16), (129,), (), (40, 40), (3, 3, 3), (257,), (50, 21), (5,), (31, 31))

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.p = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in self.SHAPES)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.p, gradients, strict=True) if g is not None]).sum()


STARTS = list(itertools.accumulate((torch.Size(shape).numel() for shape in Given.SHAPES), initial=0))
"""Where each parameter begins in the flat ones."""


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the gradients of a rank at a step, of very different sizes."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [
        (torch.randn(shape, generator=generator) * 10.0 ** (i % 4 - 2)).to(dtype)
        for i, shape in enumerate(Given.SHAPES)
    ]


class Phases(nn.Module):
    """Complex parameters beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(4, 5, dtype=torch.complex64))
        self.gain = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.turn * x).sum().abs() * self.gain * torch.arange(1.0, 8.0)).sum()


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([one.reshape(-1) for one in tensors])


def mean_gradient(world: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the mean over the ranks, in float64."""
    return sum(flat(gradients(rank, step, dtype)).double() for rank in range(world)) / world


def make(
    compressor: Compressor | None, dtype: torch.dtype = torch.float32, group: Any = None, **options: Any
) -> tuple[DistributedDataParallel, CommState]:
    """Return a DDP module of about 6 buckets with the hook on it."""
    ours = ("hierarchical", "error_feedback", "timeout")
    of_ddp = {key: options.pop(key) for key in list(options) if key not in ours}
    model = Given(dtype)
    settings = {"bucket_cap_mb": 0.004, **of_ddp}
    ddp = DistributedDataParallel(model, process_group=group, **settings)
    state = CommState(ddp, compressor, process_group=group, **{"timeout": SECONDS, **options})
    ddp.register_comm_hook(state, hook)
    return ddp, state


def module(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Given(), **{"bucket_cap_mb": 0.004, **options})


def backward(ddp: DistributedDataParallel, given: list[Tensor]) -> Tensor:
    """Return the averaged gradients, a zero for those that have none."""
    ddp.zero_grad(set_to_none=True)
    ddp(given).backward()
    return flat([torch.zeros_like(p) if p.grad is None else p.grad for p in ddp.parameters()]).clone()


def same_everywhere(values: Tensor) -> bool:
    """Tell whether all ranks have the same bits, NaN included."""
    own = values.contiguous().view(torch.uint8)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return all(torch.equal(own, part) for part in parts)


def residual(state: CommState, group: Any = None) -> Tensor:
    """Return the sum of all ranks' residuals, in float64, in the order of the parameters."""
    own = state.state_dict()["own"].get("residual", {})
    total = []
    for i, shape in enumerate(Given.SHAPES):
        whole = torch.zeros(shape.numel() if isinstance(shape, torch.Size) else torch.Size(shape).numel()).double()
        for skipped, values in own.get(f"p.{i}", []):
            whole[skipped : skipped + values.numel()] += values
        total.append(whole)
    found = torch.cat(total)
    dist.all_reduce(found, group=group)
    return found


def lacks(got: Tensor, wanted: Tensor) -> float:
    """Return the largest difference from what was wanted, relative to the largest of that."""
    return ((got - wanted).abs().max() / wanted.abs().max()).item()


def buckets(state: CommState) -> int:
    return max(layout.index for layout in state.binding.layouts) + 1


# What is refused


def message(call: Callable[[], Any]) -> str:
    """Return what `call` raised, as "Class: text"."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


# Faults

WAIT = timedelta(seconds=60)
"""A failure is noticed sooner than this where ranks are told of it, and no sooner where one merely falls silent."""


def expect_silence() -> None:
    """Let ranks wait for the reports of others for 1.5 s, not 5: one of them gives none."""
    gradient_engine.PATIENCE_S = 1.5


def dies(rank: int, world: int, hierarchical: bool) -> dict[str, Any] | None:
    """Let rank 1 end at its third step, as if killed."""
    expect_silence()
    ddp, state = make(Int8(64), hierarchical=hierarchical, timeout=WAIT)
    for step in range(2):
        backward(ddp, gradients(rank, step))
    if rank == 1:
        time.sleep(0.3)
        os._exit(3)
    return _failure(ddp, state, rank)


def different_buckets(rank: int, world: int) -> dict[str, Any]:
    """Give rank 1 buckets of another size; with find_unused_parameters DDP doesn't even them out."""
    ddp, state = make(
        Half(),
        bucket_cap_mb=0.01 if rank == 1 else 0.004,
        find_unused_parameters=True,
        timeout=WAIT,
    )
    return _failure(ddp, state, rank)


def hangs(rank: int, world: int) -> dict[str, Any]:
    """Let rank 1 not come to its third step before the others have given up."""
    expect_silence()
    ddp, state = make(Int8(64), timeout=timedelta(seconds=1))
    for step in range(2):
        backward(ddp, gradients(rank, step))
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    if rank == 1:
        store.wait(["0 gave up", "2 gave up"])
    found = _failure(ddp, state, rank)
    store.set(f"{rank} gave up", "")
    return found


class Failing(Half):
    """Fails on rank 1 alone."""

    def encode(self, values: Tensor, out: Tensor, lost: Tensor | None) -> None:
        if dist.get_rank() == 1:
            raise MemoryError("no room for the codes")
        super().encode(values, out, lost)


def compressor_fails(rank: int, world: int) -> dict[str, Any]:
    """Let a compressor raise on one rank."""
    ddp, state = make(Failing(), timeout=WAIT)
    return _failure(ddp, state, rank)


def _failure(ddp: DistributedDataParallel, state: CommState, rank: int) -> dict[str, Any]:
    began = time.monotonic()
    said = message(lambda: backward(ddp, gradients(rank, 2)))
    took = time.monotonic() - began
    again = message(lambda: backward(ddp, gradients(rank, 2)))
    began = time.monotonic()
    state.close()
    return {"said": said, "again": again, "seconds": took, "closing": time.monotonic() - began}
