"""What the ranks of the parity tests do. Nothing here asserts: ranks return what they found."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from accel.comm.compressor import Exact
from accel.comm.hooks import hook
from accel.comm.ranks.channel import GlooChannel
from accel.comm.selection.planner import Planner
from tests.comm.cases import COMPRESSORS, SECONDS, Given, backward, flat, gradients, make, message


def uneven(rank: int, world: int) -> dict[str, dict[str, Any]]:
    """Give ranks different numbers of steps within join(): each step's mean counts zeros of those that are through."""
    found = {}
    for name, hierarchical in (("exact", False), ("exact", True), ("bf16", False), ("int8", True)):
        ddp, state = make(COMPRESSORS[name](), hierarchical=hierarchical)
        worst = 0.0
        with ddp.join():
            for step in range(3 + rank):
                got = backward(ddp, gradients(rank, step))
                still = [r for r in range(world) if step < 3 + r]
                want = sum(flat(gradients(r, step)).double() for r in still) / world
                worst = max(worst, ((got.double() - want).norm() / want.norm()).item())
        found[f"{name}, {'hosts' if hierarchical else 'flat'}"] = {"error": worst, "steps": state.step}
        state.close()
    return found


def uneven_by_active(rank: int, world: int) -> dict[str, str]:
    """Ask join() to divide by the ranks that still have data: of hooks, and of ranks that must be even."""
    found = {}
    ddp, state = make(Exact())
    with ddp.join(divide_by_initial_world_size=False):
        found["hook"] = message(lambda: backward(ddp, gradients(rank, 0)))
    state.close()
    ddp = DistributedDataParallel(Given())
    planner = Planner(ddp, timeout=SECONDS)
    ddp.register_comm_hook(planner, hook)
    with ddp.join(divide_by_initial_world_size=False):
        found["planner"] = message(lambda: backward(ddp, gradients(rank, 0)))
    planner.close()
    bare = DistributedDataParallel(Given())
    with bare.join(divide_by_initial_world_size=False):
        found["made within"] = message(lambda: Planner(bare))
    ddp, state = make(Exact())
    with ddp.join(divide_by_initial_world_size=False, throw_on_early_termination=True):
        found["even"] = message(lambda: backward(ddp, gradients(rank, 0)))
    state.close()
    return found


def channels(rank: int, world: int) -> dict[str, bool]:
    """Compare a channel's collectives with torch.distributed's, for all dtypes that compressors send."""
    store = PrefixStore("parity", dist.group.WORLD.get_group_store())  # type: ignore[union-attr]
    channel = GlooChannel(store, range(world), rank, SECONDS)
    found = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int64):
        for numel in (0, 1, 7, 300_001):  # nothing, less than a rank each, odd, several pieces
            own = (torch.arange(numel) * (rank + 1) % 113).to(dtype)
            want = [torch.empty_like(own) for _ in range(world)]
            dist.all_gather(want, own)
            got = [torch.empty_like(own) for _ in range(world)]
            channel.all_gather(own, got)
            found[f"all_gather, {dtype}, {numel}"] = _equal(got, want)
            # What rank r gets from each is longer by r.
            sends = [torch.arange(numel + other).add(rank).remainder(113).to(dtype) for other in range(world)]
            want = [torch.arange(numel + rank).add(other).remainder(113).to(dtype) for other in range(world)]
            got = [torch.empty_like(one) if other != rank else sends[rank] for other, one in enumerate(want)]
            channel.exchange(sends, got)
            found[f"exchange, {dtype}, {numel}"] = _equal(got, want)
            if dtype.is_floating_point:
                summed, reference = own.clone(), own.double()
                channel.all_reduce(summed)
                dist.all_reduce(reference)
                # Integers that every format holds, or rounds by a unit in the last place of a sum of four.
                bound = 4 * torch.finfo(dtype).eps * 4 * 113
                found[f"all_reduce, {dtype}, {numel}"] = bool(((summed.double() - reference).abs() <= bound).all())
    channel.close()
    return found


def _equal(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
