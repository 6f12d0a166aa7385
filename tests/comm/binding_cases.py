"""What ranks do to bind states to DDP modules with groups and flags of their own. Nothing here asserts."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from accel.comm.dgc import DGC
from accel.comm.fsdp import FSDPComm
from accel.comm.hooks import CommState, hook
from accel.comm.int8 import Int8
from accel.comm.selection import offers
from accel.comm.selection.planner import Planner
from accel.comm.sgd_momentum import take_momentum
from tests.comm.cases import SECONDS, Given, backward, gradients, mean_gradient, message
from tests.comm.dgc_training import DENSE_BELOW, Net, loss

SOON = timedelta(seconds=10)
"""Within which ranks that would miss each other are told."""


def group_of_ddp(rank: int, world: int) -> dict[str, Any]:
    """Reduce over two ranks of three, without naming their group again."""
    pair = dist.new_group([0, 1])
    found: dict[str, Any] = {}
    if rank < 2:
        ddp = DistributedDataParallel(Given(), bucket_cap_mb=0.004, process_group=pair)
        found["other group"] = message(lambda: CommState(ddp, process_group=dist.group.WORLD, timeout=SOON))
        state = CommState(ddp, timeout=SOON)
        ddp.register_comm_hook(state, hook)
        got, want = backward(ddp, gradients(rank, 0)), mean_gradient(2, 0)
        found["error"] = ((got.double() - want).abs().max() / want.abs().max()).item()
        state.close()
        found["momentum"] = _handed_back(rank, pair)
    dist.barrier()
    return found


def _handed_back(rank: int, pair: Any) -> float:
    """Return how far the buffers that `close` gives back are from the sum of both ranks' velocities, relative."""
    ddp = DistributedDataParallel(Net(), process_group=pair)
    state = CommState(ddp, DGC(0.02, dense_below=DENSE_BELOW), timeout=SECONDS)
    ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    momentum = take_momentum(state, optimizer)
    for step in range(2):
        optimizer.zero_grad()
        loss(ddp, rank, step).backward()
        optimizer.step()
    first = ddp.module.layers[1].weight
    want = torch.zeros(first.numel(), dtype=torch.float64)
    for skipped, values in state.state_dict()["own"]["velocity"]["layers.1.weight"]:
        want[skipped : skipped + values.numel()] += values
    dist.all_reduce(want, group=pair)
    momentum.close()
    state.close()
    got = optimizer.state[first]["momentum_buffer"].view(-1)
    return ((got - want).abs().max() / want.abs().max()).item()


def refusals(rank: int, world: int) -> dict[str, str]:
    """Bind to modules that leave out buckets."""
    ddp = DistributedDataParallel(Given(), find_unused_parameters=True)
    ddp.skip_all_reduce_unused_params = True  # as torch 2.10 and later note the argument
    return {
        "state": message(lambda: CommState(ddp, timeout=SOON)),
        "planner": message(lambda: Planner(ddp, timeout=SOON)),
        "accel.optimize": offers.refusal(ddp, ()),
    }


class SharedAndOwn(nn.Module):
    """A layer that all ranks share, and one that each has in a size of its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.shared, self.own = nn.Linear(3, 3), nn.Linear(3, 2 + rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.shared(x))


def ignored(rank: int, world: int) -> dict[str, Any]:
    """Bind to a module, and to what it wraps, where DDP was told to ignore what differs between ranks."""
    net = SharedAndOwn(rank)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
        net, ["own.weight", "own.bias"]
    )
    ddp = DistributedDataParallel(net)
    found: dict[str, Any] = {}
    for name, model in (("module", ddp), ("wrapped", net)):

        def bind(model: nn.Module = model) -> None:
            CommState(model, timeout=SOON).close()

        found[name] = message(bind)
    state = CommState(net, Int8(), timeout=SOON)
    ddp.register_comm_hook(state, hook)
    ddp(torch.full((2, 3), rank + 1.0)).sum().backward()
    state.close()
    grad = net.shared.weight.grad
    assert grad is not None
    both: list[Any] = [None] * world
    dist.all_gather_object(both, grad)
    found["same"] = all(torch.equal(grad, one) for one in both)
    return found


def groups_anew(rank: int, world: int, folder: str) -> dict[str, str]:
    """Make groups anew in the same processes, of which one had made states in a group before."""
    dist.barrier()  # a rank that is through would cut off those that are still connecting
    dist.destroy_process_group()
    if rank == 0:
        _init(Path(folder, "before"), 0, 1)
        _bind(1)
        dist.destroy_process_group()
    _init(Path(folder, "after"), rank, world)
    return _bind(world)


def _init(store: Path, rank: int, world: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=SECONDS)


def _bind(world: int) -> dict[str, str]:
    def hooked() -> None:
        CommState(DistributedDataParallel(Given()), timeout=SOON).close()

    def sharded() -> None:
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(4, 4), mesh=mesh["shard"])
        FSDPComm(model, mesh, timeout=SOON).close()

    return {"hooks": message(hooked), "FSDP2": message(sharded)}
