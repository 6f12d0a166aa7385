"""What local SGD averages beside plain weights, and what it leaves alone. Nothing here asserts."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel.amp import DynamicLossScale, decorate
from accel.comm.local_sgd import LocalSGD
from accel.optim import FusedSGD
from tests.comm.cases import SECONDS, same_everywhere
from tests.comm.local_sgd_training import Net, loss

Made = tuple[DistributedDataParallel, torch.optim.Optimizer]


def of_sixteen_bits() -> Made:
    ddp = DistributedDataParallel(Net(torch.bfloat16))
    return ddp, FusedSGD(ddp.parameters(), lr=1e-4, momentum=0.9)


# Steps are so short that most weights of 16 bits stay what they were.
WITH_MASTERS: dict[str, Callable[[], Made]] = {
    "accel.optim": of_sixteen_bits,
}


def masters(optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, Tensor]]:
    """Return 16-bit parameters and their master weights."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    return [(p, optimizer.state[p]["master"]) for p in own if "master" in optimizer.state[p]]


def _flat(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.cat([master.reshape(-1) for _, master in masters(optimizer)]).clone()


def with_masters(rank: int, world: int) -> dict[str, dict[str, Any]]:
    """Take local steps that 16 bits have no room for, average, and go on under DDP alone."""
    found = {}
    for name, make in WITH_MASTERS.items():
        ddp, optimizer = make()
        local = LocalSGD(ddp, optimizer, 0, 9, within="rank", average_momentum=True, timeout=SECONDS)
        for step in range(3):
            _step(ddp, optimizer, rank, step)
        before = _flat(optimizer)
        mean = before.double()
        dist.all_reduce(mean)
        local.average()
        after = _flat(optimizer)
        rounded = all(torch.equal(master.to(p.dtype), p) for p, master in masters(optimizer))
        _step(ddp, optimizer, rank, 3)
        kept = (_flat(optimizer) - after).abs().max().item()
        local.close()
        closed = same_everywhere(_flat(optimizer))
        for step in range(4, 7):
            _step(ddp, optimizer, rank, step)
        found[name] = {
            "count": len(masters(optimizer)),
            "apart": not same_everywhere(before),
            "error": (after - mean / world).abs().max().item(),
            "rounded": rounded,
            "next step": kept,
            "closed": closed,
            "trained on": same_everywhere(_flat(optimizer)),
        }
    return found


def _step(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    (loss(ddp, rank, step) * factor).backward()
    optimizer.step()


def unused_by_one(rank: int, world: int) -> tuple[int, bool]:
    """Let rank 0 alone use a layer before the first averaging: the others' optimizer has no masters of it yet."""
    torch.manual_seed(1)
    net = nn.ModuleList(nn.Linear(4, 4, dtype=torch.bfloat16) for _ in range(2))
    net.forward = lambda x: net[1](net[0](x)) if rank == 0 else net[0](x)  # type: ignore[method-assign]
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = FusedSGD(ddp.parameters(), lr=1e-4)
    with LocalSGD(ddp, optimizer, 0, 2, within="rank", timeout=SECONDS):
        for _ in range(2):
            optimizer.zero_grad()
            ddp(torch.ones(2, 4, dtype=torch.bfloat16) * (rank + 1)).square().sum().backward()
            optimizer.step()
        same = same_everywhere(_flat(optimizer))
    return len(masters(optimizer)), same


ENDS: dict[str, Callable[[LocalSGD], Any]] = {
    "averaging": lambda local: None,
    "average()": lambda local: local.average(),
    "close()": lambda local: local.close(),
    "resumed": lambda local: (local.load_state_dict(pickle.loads(pickle.dumps(local.state_dict()))), local.average()),
}
"""What comes after steps with a frozen layer, whose last averaging was before it was frozen."""


def frozen_between(rank: int, world: int) -> dict[str, dict[str, bool]]:
    """Freeze a layer after two of four local steps, as one that trains the head first, or last."""
    found = {}
    for how, end in ENDS.items():
        ddp = DistributedDataParallel(Net(), find_unused_parameters=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
        every = 4 if how == "averaging" else 9
        local = LocalSGD(ddp, optimizer, 0, every, within="rank", timeout=SECONDS)
        for step in range(2):
            _step(ddp, optimizer, rank, step)
        weight = ddp.module.first.weight
        before, apart = weight.detach().clone(), not same_everywhere(weight.detach())
        ddp.module.first.requires_grad_(False)
        for step in range(2, 4 if how == "averaging" else 3):
            _step(ddp, optimizer, rank, step)
        end(local)
        same = same_everywhere(torch.cat([p.detach().view(-1) for p in ddp.parameters()]))
        after = weight.detach().clone()
        if how == "close()":
            found[how] = {"apart": apart, "same": same, "frozen": not torch.equal(before, after)}
            continue
        local.average()
        found[how] = {"apart": apart, "same": same, "frozen": torch.equal(after, weight.detach())}
        local.close()
    return found


def ignored(rank: int, world: int) -> dict[str, Any]:
    """Leave a parameter, a buffer and one of integers to each rank."""
    net = Net()
    own = ["gain", "norm.running_mean", "norm.num_batches_tracked"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, own)  # type: ignore[no-untyped-call]
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    with torch.no_grad():
        net.gain.fill_(rank + 1)
        net.norm.num_batches_tracked.fill_(10 * rank)
    with LocalSGD(ddp, optimizer, 0, 9, within="rank", average_momentum=True, timeout=SECONDS) as local:
        for step in range(2):
            _step(ddp, optimizer, rank, step)
        before = [one.clone() for one in _of_gain(net, optimizer)]
        local.average()
    return {
        "own": all(map(torch.equal, before, _of_gain(net, optimizer))),
        "counted": int(net.norm.num_batches_tracked),
        "others": same_everywhere(torch.cat([net.first.weight.detach().view(-1), net.norm.running_var])),
        "momentum": same_everywhere(optimizer.state[net.first.weight]["momentum_buffer"]),
    }


def _of_gain(net: Net, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    buffers = [net.norm.running_mean]
    return [net.gain.detach(), optimizer.state[net.gain]["momentum_buffer"], *(b for b in buffers if b is not None)]


def loss_scale(rank: int, world: int) -> dict[str, Any]:
    """Let each rank find infinities of its own, by a decorated model's loss scale, and close."""
    ddp = DistributedDataParallel(Net(torch.float32))
    scale = DynamicLossScale(initial=2.0**10, interval=100)
    optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    ddp, optimizer = decorate(ddp, optimizer, dtype=torch.float16, loss_scale=scale)
    infinite = {0: {1}, 1: {0, 2}}
    with LocalSGD(ddp, optimizer, 0, 9, within="rank", timeout=SECONDS):
        for step in range(4):
            _step(ddp, optimizer, rank, step, float("inf") if step in infinite.get(rank, ()) else 1.0)
        before: list[Any] = [None] * world
        dist.all_gather_object(before, scale.state_dict()["scale"])
    for step in range(4, 8):
        _step(ddp, optimizer, rank, step)
    flat = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    return {"before": before, "same": same_everywhere(flat), "finite": bool(flat.isfinite().all())}
