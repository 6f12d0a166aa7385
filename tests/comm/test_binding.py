"""States bound to DDP modules with a group, ignored parameters or flags of their own; which ranks share a host."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
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
from accel.comm.ranks.topology import Topology, from_identities, identity
from accel.comm.selection import offers
from accel.comm.selection.planner import Planner
from tests.comm.cases import SECONDS, Given, backward, gradients, lacks, mean_gradient, message, same_everywhere
from tests.comm.dgc_training import DENSE_BELOW, SGD, Training
from tests.comm.ranks import on_ranks

SOON = timedelta(seconds=10)
"""Within which ranks that would miss each other are told."""


@on_ranks(3)
def test_gradients_and_momentum_go_over_ddps_own_group(rank: int, world: int) -> None:
    """Over two ranks of three, whose group is not named again."""
    pair = dist.new_group([0, 1])
    if rank < 2:
        ddp = DistributedDataParallel(Given(), bucket_cap_mb=0.004, process_group=pair)
        assert message(lambda: CommState(ddp, process_group=dist.group.WORLD, timeout=SOON)) == (
            "InvalidArgument: process_group must be of the ranks that DDP reduces over, [0, 1], got one of [0, 1, 2]; "
            "leave "
            "it out"
        )
        state = CommState(ddp, timeout=SOON)
        ddp.register_comm_hook(state, hook)
        assert lacks(backward(ddp, gradients(rank, 0)), mean_gradient(2, 0)) < 1e-6  # a sum of two in float32
        state.close()
        # Momentum that is given back is the sum of both ranks' velocities.
        run = Training(DGC(0.02, exact_below=DENSE_BELOW), SGD, process_group=pair)
        for step in range(2):
            run.step(rank, step)
        want = run.own("velocity")["layers.1.weight"]
        dist.all_reduce(want, group=pair)
        assert run.momentum is not None
        run.momentum.close()
        assert lacks(run.sgd.state[run.net.layers[1].weight]["momentum_buffer"].view(-1), want) < 1e-15
        run.close()
    dist.barrier()


@on_ranks(2)
def test_a_module_that_leaves_buckets_out_is_refused(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(Given(), find_unused_parameters=True)
    ddp.skip_all_reduce_unused_params = True  # as torch 2.10 and later note the argument
    reason = "DDP must call the hook for every bucket of a step, got skip_all_reduce_unused_params=True"
    said = message(lambda: CommState(ddp, timeout=SOON))
    assert said == f"InvalidArgument: {reason}; leave it out of the module, or CommState"
    assert message(lambda: Planner(ddp, timeout=SOON)) == f"InvalidArgument: {reason}"
    assert offers.refusal(ddp, ()) == reason


class SharedAndOwn(nn.Module):
    """A layer that all ranks share, and one that each has in a size of its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.shared, self.own = nn.Linear(3, 3), nn.Linear(3, 2 + rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.shared(x))


@on_ranks(2)
def test_parameters_that_ddp_ignores_may_differ_between_ranks(rank: int, world: int) -> None:
    net = SharedAndOwn(rank)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
        net, ["own.weight", "own.bias"]
    )
    ddp = DistributedDataParallel(net)
    CommState(ddp, timeout=SOON).close()
    state = CommState(net, Int8(), timeout=SOON)
    ddp.register_comm_hook(state, hook)
    ddp(torch.full((2, 3), rank + 1.0)).sum().backward()
    state.close()
    assert net.shared.weight.grad is not None
    assert same_everywhere(net.shared.weight.grad)


@on_ranks(2)
def test_groups_that_come_anew_know_nothing_of_those_before(rank: int, world: int, tmp_path: Path) -> None:
    """By the group's name, which comes again, a rank that had been in one before looked for the others elsewhere."""
    dist.barrier()  # a rank that is through would cut off those that are still connecting
    dist.destroy_process_group()
    if rank == 0:
        _init(tmp_path / "before", 0, 1)
        _bind(1)
        dist.destroy_process_group()
    _init(tmp_path / "after", rank, world)
    _bind(world)


def _init(store: Path, rank: int, world: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=SECONDS)


def _bind(world: int) -> None:
    CommState(DistributedDataParallel(Given()), timeout=SOON).close()
    mesh: Any = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    FSDPComm(fully_shard(nn.Linear(4, 4), mesh=mesh["shard"]), mesh, timeout=SOON).close()


def told(agent: str, machine: str) -> dict[str, str]:
    return {"agent": agent, "machine": machine}


def test_torchruns_agents_are_hosts_even_on_one_machine() -> None:
    found = from_identities([told("0", "m"), told("1", "m"), told("0", "m"), told("1", "m")])
    assert found.hosts == ((0, 2), (1, 3))
    assert found.within(3) == (1, 3)
    assert found.across(3) == (2, 3)
    assert found.host_of(2) == 0


def test_without_agents_on_every_rank_machines_are_hosts() -> None:
    found = from_identities([told("0", "a"), told("", "b"), told("", "a")])
    assert found.hosts == ((0, 2), (1,))
    assert not found.even
    with pytest.raises(ValueError, match=r"as many ranks on each host, got 2 on host 0, 1 on host 1; start as many"):
        found.across(0)


@pytest.mark.parametrize("hosts", [((0, 0),), ((1,),), ((0,), ()), ((0, 2),)])
def test_every_rank_is_on_one_host(hosts: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="each of the ranks 0, 1, … once"):
        Topology(hosts)


def test_identity_takes_the_agent_only_from_torchrun() -> None:
    assert identity({"GROUP_RANK": "3"})["agent"] == ""
    assert identity({"GROUP_RANK": "3", "LOCAL_WORLD_SIZE": "2"})["agent"] == "3"
    assert identity({})["machine"] == identity({"GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "1"})["machine"]
