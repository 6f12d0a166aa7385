"""What the ranks of the parity tests do. Nothing here asserts: ranks return what they found."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from accel.comm.compressor import Compressor, Exact
from accel.comm.dgc import DGC
from accel.comm.half import Half
from accel.comm.hooks import CommState, hook
from accel.comm.int8 import Int8
from accel.comm.one_bit import OneBit
from accel.comm.powersgd import PowerSGD
from accel.comm.ranks.channel import GlooChannel
from accel.comm.selection.planner import Planner
from tests.comm.cases import SECONDS, Given, backward, flat, gradients, make, message
from tests.comm.local_sgd_training import Net, Run, loss

COMPRESSORS: dict[str, Callable[[], Compressor]] = {
    "exact": Exact,
    "fp16": lambda: Half(torch.float16),
    "bf16": Half,
    "int8": lambda: Int8(64),
    "1-bit": lambda: OneBit(64),
    "PowerSGD": lambda: PowerSGD(2),
    "top 5 %": lambda: DGC(0.05, momentum=False),
}


def checkpoints(rank: int, world: int, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Save to a file, load as tensors alone into new objects, go on: each compressor."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            whole, first, second = (_fresh(COMPRESSORS[name]()) for _ in range(3))
            straight = [backward(whole[0], gradients(rank, step)) for step in range(5)]
            parts = [backward(first[0], gradients(rank, step)) for step in range(3)]
            path = Path(folder) / "comm.pt"
            torch.save(first[1].state_dict(), path)
            second[1].load_state_dict(torch.load(path, weights_only=True))
            parts += [backward(second[0], gradients(rank, step)) for step in range(3, 5)]
            found[name] = {
                "same bits": all(torch.equal(a, b) for a, b in zip(straight, parts, strict=True)),
                "steps": second[1].step,
            }
            for _, state in (whole, first, second):
                state.close()
    return found


def _fresh(compressor: Compressor) -> tuple[DistributedDataParallel, CommState]:
    # With find_unused_parameters DDP keeps its first buckets, so that both runs encode alike.
    feedback = compressor.takes_feedback
    return make(compressor, error_feedback=feedback, find_unused_parameters=True)


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


def post_local(rank: int, world: int, per_host: int) -> dict[str, float]:
    """Compare post-local SGD with torch's own: hook, averager and optimizer."""
    from torch.distributed.optim import (
        PostLocalSGDOptimizer,
    )  # warns, and warnings are errors where tests are collected

    found = {}
    for within in ("host", "rank"):
        ours = Run(lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), 3, 4, within=within)
        host, _ = dist.new_subgroups(per_host)
        ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.002)
        ddp.register_comm_hook(PostLocalSGDState(None, host, 3, within == "host"), post_localSGD_hook)
        inner = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(inner, 3, 0.7)
        # Torch's averager averages first at its warm-up's end, ours `every` steps after start_step.
        theirs = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=4, warmup_steps=6))
        worst = 0.0
        for step in range(12):
            ours.step(rank, step)
            theirs.zero_grad()
            loss(ddp, rank, step).backward()
            theirs.step()
            schedule.step()
            got, want = (flat([p.detach() for p in one.parameters()]) for one in (ours.ddp, ddp))
            worst = max(worst, ((got - want).abs().max() / want.abs().max()).item())
        found[within] = worst
        ours.local.close()
    return found
