"""A process group of the test's own process alone, and models that train on two ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_ENDED: list[Any] = []
"""Groups that were destroyed, which are never freed: torch's destructor waits, with the GIL, for a thread that may need
the GIL to free the tensors of its last collective. On one core a test hung so for good."""


@contextlib.contextmanager
def group_of_one(folder: Path) -> Iterator[None]:
    """Have a Gloo group of one rank, which meets in a file of this folder."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    _ENDED.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


KINDS = ("ddp", "fsdp2", "hsdp")
"""How a model may be trained on two ranks, each of which has a way to put the exchange of gradients off."""


def parallel(model: Any, kind: str) -> Any:
    """Return a model in DDP, sharded over both ranks (FSDP2), or over one with a replica on each (HSDP)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if kind == "ddp":
        return DistributedDataParallel(model)
    shape, names = ((2, 1), ("replicate", "shard")) if kind == "hsdp" else ((2,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def exchange(model: Any, kind: str, now: bool) -> None:
    """Let the next backward pass exchange gradients, or put that off to a later one."""
    if kind == "ddp":
        model.require_backward_grad_sync = now
    elif kind == "fsdp2":
        model.set_requires_gradient_sync(now)
    else:
        model.set_requires_all_reduce(now)
