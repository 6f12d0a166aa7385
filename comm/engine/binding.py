"""What an engine is bound to: the parameters of a model, and the ranks that average its gradients."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore

from accel.comm.layout import Layout
from accel.comm.ranks import topology
from accel.comm.ranks.channel import GlooChannel, own_store
from accel.comm.ranks.failure import CommError
from accel.comm.ranks.object_group import ObjectGroup
from accel.comm.ranks.topology import Topology
from accel.profiler.errors import InvalidArgument
from accel.profiler.rendezvous import RanksDiverged, Rendezvous

A = TypeVar("A")


class Binding:
    """A model and a process group; every rank of the group makes one.

    Args:
        model: the DDP module or the module that it wraps; it is not kept alive.
        process_group: default that of the DDP module, or the world.
        kind: what the user makes one of, for messages.

    Raises:
        InvalidArgument: if there is no process group, this rank is not in it, the DDP module has other ranks or leaves
            buckets out, or the model has no parameters.
    """

    def __init__(self, model: nn.Module, process_group: dist.ProcessGroup | None, kind: str) -> None:
        ddp = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
        bare = model if ddp is None else ddp.module
        ignored = ignored_names(model)
        named = [(name, parameter) for name, parameter in bare.named_parameters() if name not in ignored]
        self.ddp: Callable[[], nn.parallel.DistributedDataParallel | None] = (
            (lambda: None) if ddp is None else weakref.ref(ddp)
        )
        """Return the DDP module, if it is one and still there."""
        self.kind = kind
        self.group = _group(process_group, ddp, kind)
        self.rank, self.size = self.group.rank(), self.group.size()
        if not named:
            raise InvalidArgument("the model must have parameters, got none")
        self.names = {id(parameter): name for name, parameter in named}
        """Of the parameters, by identity."""
        self.device: torch.device = named[0][1].device
        self.store = own_store(self.group, "comm")
        described = [
            (name, tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad) for name, parameter in named
        ]
        self._described = {
            "number of parameters": len(described),
            "parameters' names, shapes and dtypes": zlib.crc32(repr(described).encode()),
            "torch": torch.__version__,
        }
        self._layouts: dict[tuple[int, ...], Layout] = {}

    @property
    def layouts(self) -> list[Layout]:
        """Return the layouts of all buckets seen so far."""
        return list(self._layouts.values())

    def check_mean(self) -> None:
        """Raise InvalidArgument if gradients are to be divided by another number than that of all ranks."""
        ddp = self.ddp()
        if ddp is not None and divides_by_active(ddp):
            raise InvalidArgument(
                "DDP hands gradients to a hook without the number of ranks that still have data; leave out "
                "join(divide_by_initial_world_size=False), or the hook"
            )

    def layout(self, bucket: dist.GradBucket) -> Layout:  # type: ignore[name-defined]
        """Return what a bucket holds, or raise InvalidArgument if it holds parameters of another model."""
        parameters = bucket.parameters()
        key = (bucket.index(), bucket.is_last(), *map(id, parameters))
        if key not in self._layouts:
            self._layouts[key] = self._new_layout(bucket, parameters)
        return self._layouts[key]

    def _new_layout(self, bucket: dist.GradBucket, parameters: list[Tensor]) -> Layout:  # type: ignore[name-defined]
        unknown = [tuple(parameter.shape) for parameter in parameters if id(parameter) not in self.names]
        if unknown:
            raise InvalidArgument(
                f"a bucket must hold parameters of the model that {self.kind} got, got one of shape {unknown[0]} that "
                "is not; pass the module that DDP wraps, and make one state for each DDP module"
            )
        names = tuple(self.names[id(parameter)] for parameter in parameters)
        shapes = tuple(parameter.shape for parameter in parameters)
        return Layout(bucket.index(), names, shapes, bucket.buffer().dtype, bucket.is_last())

    def objects(self, timeout: timedelta) -> ObjectGroup:
        """Return a new group that exchanges objects between the ranks; every rank makes as many."""
        return ObjectGroup(GlooChannel(PrefixStore("objects", self.store), range(self.size), self.rank, timeout))

    # -- meetings ----------------------------------------------------------------------------------------------------

    def rendezvous(self, name: str, patience_s: float) -> Rendezvous:
        """Return a place for the ranks to meet at, of a name that no other has."""
        remedy = "every rank must make as many, in the same order"
        return Rendezvous(PrefixStore(name, self.store), self.rank, self.size, patience_s, remedy)

    def agree(self, rendezvous: Rendezvous, own: Any, answer: Callable[[list[Any]], A]) -> A:
        """Return what rank 0 makes of what all ranks brought; raise CommError if one does not come."""
        try:
            return rendezvous.meet(own, answer, f"made no {self.kind}")
        except RanksDiverged as error:
            raise CommError(str(error)) from None

    def meet(self, patience: timedelta) -> Topology:
        """Return hosts and ranks, once all ranks are here with the same model."""

        def answer(introductions: list[tuple[Mapping[str, str], Mapping[str, object]]]) -> Topology:
            check_same([described for _, described in introductions], self.kind)
            return topology.from_identities([identity for identity, _ in introductions])

        rendezvous = self.rendezvous("meeting", patience.total_seconds())
        return self.agree(rendezvous, (topology.identity(), self._described), answer)


def ignored_names(model: nn.Module) -> set[str]:
    """Return the parameters and buffers that DDP was told to leave to each rank, of a DDP module or what it wraps."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return set(model.parameters_to_ignore)
    return set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def divides_by_active(ddp: nn.parallel.DistributedDataParallel) -> bool:
    """Return whether a module is within a `join()` that divides gradients by the ranks that still have data."""
    config = ddp._join_config
    every = getattr(ddp, "_divide_by_initial_world_size", True) or config.throw_on_early_termination
    return bool(config.enable and not every)


def why_no_steps(ddp: nn.parallel.DistributedDataParallel) -> str:
    """Return why a hook on a module can't tell where a step begins, '' if it can."""
    if getattr(ddp, "skip_all_reduce_unused_params", False):  # since torch 2.10; the first bucket may never come
        return "DDP must call the hook for every bucket of a step, got skip_all_reduce_unused_params=True"
    return ""


def check_same(described: Sequence[Mapping[str, object]], kind: str) -> None:
    """Raise InvalidArgument unless all ranks describe the same."""
    for rank, theirs in enumerate(described):
        for name, value in theirs.items():
            if value != (first := described[0][name]):
                raise InvalidArgument(
                    f"all ranks must have the same {name}, got {first} on rank 0 and {value} on rank {rank}; pass the "
                    f"same to {kind} everywhere"
                )


def _group(
    process_group: dist.ProcessGroup | None, ddp: nn.parallel.DistributedDataParallel | None, kind: str
) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise InvalidArgument(f"{kind} needs a process group: call torch.distributed.init_process_group first")
    of_ddp = dist.group.WORLD if ddp is None else ddp.process_group
    group = of_ddp if process_group is None else process_group
    if not isinstance(group, dist.ProcessGroup):  # what new_group returns to those outside is no group
        raise InvalidArgument(f"rank {dist.get_rank()} is not in process_group; make {kind} only on its members")
    if ddp is not None:
        _check_ddp(ddp, group, kind)
    return group


def _check_ddp(ddp: nn.parallel.DistributedDataParallel, group: dist.ProcessGroup, kind: str) -> None:
    if group is not ddp.process_group:
        ranks, of_ddp = (sorted(dist.get_process_group_ranks(one)) for one in (group, ddp.process_group))
        if ranks != of_ddp:
            raise InvalidArgument(
                f"process_group must be of the ranks that DDP reduces over, {of_ddp}, got one of {ranks}; leave it out"
            )
    if reason := why_no_steps(ddp):
        raise InvalidArgument(f"{reason}; leave it out of the module, or {kind}")
