"""The process group of a training, formed anew with other ranks while the processes that stay go on."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store, _world
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accel.comm.selection import reducer
from accel.dataio.elastic_sampler import ElasticSampler
from accel.dataio.passes.underway import PassesUnderWay
from accel.elastic import bucket_order
from accel.elastic.resize_orders import Meeting
from accel.optimized import MODELS
from accel.profiler.interruptions import Tolerated
from accel.run import ranks

_COME_S = 20.0
"""In which a process that has said that it is there comes to the group."""


def reason_against(model: nn.Module, optimizer: Optimizer, sampler: ElasticSampler, underway: PassesUnderWay) -> str:
    """Return why a training can't go on with other ranks in its processes; '' if it can.

    Args:
        model: of the loop.
        optimizer: of the model.
        sampler: of its loader.
        underway: passes over that loader.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return "the script has no process group, which it must make with one rank, too"
    if len(_world.pg_map) > 1:
        return "the script has made process groups of its own"
    if len(MODELS) > 1:
        return "more than one model is trained"
    if "Redundancy" in type(optimizer).__name__:
        return "each rank has a part of its optimizer's state"
    if len(set(sampler.batch_sizes)) > 1:
        return "its ranks have batches of different sizes"
    if sampler.holds_batches:
        return "its loop holds batches that it has not trained on"
    if underway.oldest is not underway.current:
        return "its loop has begun a pass over the loader within another one"
    own = _parallel(model)
    if len(own) < _alive():
        gc.collect()  # some may be left in a circle
        if len(own) < _alive():
            return "a DistributedDataParallel is not in the model"
    return next(filter(None, map(_reason_of, own)), "")


def _reason_of(ddp: DistributedDataParallel) -> str:
    if ddp.process_group is not dist.group.WORLD:
        return "its DistributedDataParallel has a process group of its own"
    if ddp._comm_hooks or not reducer.is_as_made(ddp):
        return "its gradients are exchanged in another way, by a communication hook or a strategy that was kept"
    return (
        "" if reducer.is_renewable(ddp) else "its DistributedDataParallel can't be made anew (static_graph, join(), …)"
    )


def backend() -> str:
    """Return the backend of the process group as `init_process_group` takes it: one, or one for each kind of device."""
    name = dist.get_backend()
    return dist.get_backend_config() if name == "undefined" else str(name)


def open_store(address: str) -> tuple[Store, int]:
    """Return a store of this process that others reach, and its port.

    Args:
        address: of this host.
    """
    store: Any = torch.distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    return store, store.port


def store_of(meeting: Meeting) -> Store:
    """Return the store that another process has opened."""
    store: Store = torch.distributed.TCPStore(meeting.address, meeting.port, is_master=False)  # type: ignore[attr-defined]
    return store


def say_here(store: Store, rank: int) -> None:
    """Say that a process has come, and wait until all have, and those that train are agreed.

    Raises:
        RuntimeError: if they are not.
    """
    store.set(f"here-{rank}", "")
    store.wait(["go"], timedelta(seconds=2 * _COME_S))


def all_here(store: Store, added: Iterable[int]) -> bool:
    """Return whether all processes that were added have come: before anything is given up for them."""
    try:
        store.wait([f"here-{rank}" for rank in added], timedelta(seconds=_COME_S))
    except RuntimeError:
        return False
    return True


def let_go(store: Store) -> None:
    """Let those that have come form the group."""
    store.set("go", "")


def form(model: nn.Module, store: Store, number: int, *, rank: int, size: int, backend: str) -> None:
    """Form the process group anew; all ranks call it, those that stay and those that have come.

    Args:
        model: of the loop, whose `DistributedDataParallel` goes on with the new group.
        store: that all of them reach.
        number: of the order.
        rank: this one.
        size: how many there are.
        backend: of the group, by device.
    """
    parallel = _parallel(model)
    for ddp in parallel:
        del ddp.reducer, ddp.logger  # whose hooks go with them
    timeout = _timeout()
    dist.destroy_process_group()
    dist.init_process_group(
        backend, store=PrefixStore(f"resize-{number}", store), rank=rank, world_size=size, timeout=timeout
    )
    for ddp in parallel:
        reducer.go_over_to(ddp, dist.group.WORLD)
    # A newcomer's script may not have put its hooks there yet; and all ranks lay out their buckets, or none.
    heard = any(bucket_order.is_heard(parameter) for parameter in model.parameters())
    store.set(f"heard-{rank}", "yes" if heard else "no")
    bucket_order.is_heard_elsewhere = any(store.get(f"heard-{other}") == b"yes" for other in range(size))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    ranks.begin_anew()


def _alive() -> int:
    """Return how many there are in this process."""
    return sum(issubclass(type(each), DistributedDataParallel) for each in gc.get_objects())


def _parallel(model: nn.Module) -> list[DistributedDataParallel]:
    return [each for each in model.modules() if isinstance(each, DistributedDataParallel)]


def _timeout() -> Any:
    """Return what the group's exchanges wait for; None for torch's default."""
    with Tolerated("a group has no such options"):  # as the one before a process has come
        assert dist.group.WORLD is not None
        return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    return None
