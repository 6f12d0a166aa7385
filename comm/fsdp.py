"""FSDP2 between hosts: shards of gradients averaged over replicas, compressed, with error feedback.

    mesh = init_device_mesh("cuda", (hosts, per_host), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    comm = FSDPComm(model, mesh, Int8())

FSDP2 reduces and scatters gradients over the "shard" dimension, within a host. What is left for the "replicate"
dimension is a rank's shard: it goes through PyTorch's `set_all_reduce_hook`, which is called with it. Sharded over both
dimensions, FSDP2 all-reduces between hosts by itself, and calls that hook after it with nothing left to save. So the
model is sharded over one dimension.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accel.comm.compressor import RESIDUAL, Compressor, chosen
from accel.comm.compressor_memory import LossScale, Memory
from accel.comm.engine.pipeline import BucketJob
from accel.comm.engine.reduction import Reduction
from accel.comm.layout import Layout
from accel.comm.ranks.channel import Channel, ConnectionBroken, GlooChannel, channel_kind, own_store
from accel.comm.ranks.failure import CommError
from accel.comm.ranks.object_group import ObjectGroup
from accel.profiler.errors import InvalidArgument


class FSDPComm:
    """Average FSDP2's gradient shards over replicas, as a compressor sends them.

    Every rank makes one, with the same arguments, after `fully_shard` and before the first backward pass. The loop
    stays as it is. Gradients are accumulated with `set_requires_gradient_sync` or `set_requires_all_reduce`, as without
    it.

    A hook of FSDP2 returns nothing and works in place, so it runs where FSDP2 calls it: on a GPU on the stream of
    all-reduces, beside backward; on a CPU, where FSDP2's own collectives block as well, within backward. Not run on
    GPUs yet.

    Residuals belong to the shards: save `state_dict()` on each rank, load it on the rank with the same place in the
    mesh. Σ over replicas of residuals of one shard is what its mean gradient still lacks; for another number of
    replicas, `accel.reshard` the states of those with the same shard. On another number of shards, begin
    without.

    Args:
        model: with one or more FSDP2 modules in it, each sharded over `mesh`'s second dimension alone.
        mesh: of two dimensions: replicas (hosts), and shards within each.
        compressor: what is sent between replicas; default `Exact()`. One that looks at shapes, as PowerSGD, sees those
            of the shards.
        error_feedback: add what a step's encoding lost to the next step's gradients; default: as the compressor says.
            Two copies of the rank's shard.
        timeout: for each collective, default 5 minutes.
        scaler: the GradScaler in use, so that what was not sent yet follows its scale; default None.

    Raises:
        InvalidArgument: if mesh, model and compressor don't go together, or differ between ranks.
        accel.CommError: from `loss.backward()`, if communication fails.

    Example:
        >>> comm = FSDPComm(model, mesh, Int8(), error_feedback=True)
        >>> loss.backward()
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        compressor: Compressor | None = None,
        *,
        error_feedback: bool | None = None,
        timeout: timedelta = timedelta(minutes=5),
        scaler: Any = None,
    ) -> None:
        compressor, self.error_feedback = chosen(compressor, error_feedback, timeout)
        if compressor.fields or compressor.needs_whole_step:
            raise InvalidArgument(
                f"{compressor!r} works on the whole gradient or takes the optimizer's momentum, which shards don't "
                "have; with DGC, pass momentum=False and no max_grad_norm"
            )
        check_mesh(model, mesh)
        self.compressor = compressor
        self.step = 0
        """Backward passes with gradients reduced, so far."""
        self._loss_scale = LossScale(scaler)
        self._groups = shard_groups(model)
        self._device = next(model.parameters()).device
        self._connect(mesh, timeout)
        self._check_same(model)
        fields = (RESIDUAL,) if self.error_feedback else ()
        self._memory = Memory()
        self._reduction = Reduction(compressor, fields, self._memory, self._across.size)
        self._stages = list(compressor.stages())
        self._pass = -1
        self._seen: set[int] = set()
        self._closed = False
        for group in self._groups:
            group.module.set_all_reduce_hook(functools.partial(self._hook, group))

    def _connect(self, mesh: DeviceMesh, timeout: timedelta) -> None:
        def channel(kind: Any, dim: int, name: str) -> Any:
            group: Any = mesh.get_group(dim)
            return kind(own_store(group, f"fsdp/{name}"), range(group.size()), group.rank(), timeout)

        self._across: Channel = channel(channel_kind(self._device), 0, "replicas")
        self._within = ObjectGroup(channel(GlooChannel, 1, "shards"))
        self._between = ObjectGroup(channel(GlooChannel, 0, "talk"))

    def _check_same(self, model: nn.Module) -> None:
        own = {
            "compressor": repr(self.compressor),
            "error_feedback": self.error_feedback,
            "modules, parameters and shards": [group.layout for group in self._groups],
            "weights": contents(model),
        }
        for objects in (self._between, self._within):
            for rank, theirs in enumerate(objects.gather(own)):
                for name, value in own.items():
                    # Shards differ in their weights, and the last ones in nothing else: they are padded.
                    if theirs[name] != value and (objects is self._between or name != "weights"):
                        self._disconnect()
                        kind = "replica" if objects is self._between else "shard"
                        raise InvalidArgument(
                            f"all ranks must have the same {name}, got another on {kind} {rank} than on this rank; "
                            "pass the same to FSDPComm everywhere, and begin with the same weights on all replicas"
                        )

    # -- gradients ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _hook(self, group: ShardGroup, shard: Tensor) -> None:
        """Replace a module's gradient shard, the mean over shards, by its mean over replicas too."""
        if self._closed:
            raise InvalidArgument("an FSDPComm that was closed can't average over replicas any more; make a new one")
        if shard.numel() != group.layout.numel:
            raise InvalidArgument(
                f"all parameters of {group.name} must take part in backward, got gradients of {shard.numel():,} of "
                f"{group.layout.numel:,} elements; FSDP2 does not tell a hook which are there: use all, freeze them "
                "before FSDPComm is made, or set_reduce_scatter_unused_params(True) where PyTorch has it"
            )
        if not group.accumulated(shard):
            return
        self._begin(group.layout.index)
        if group.own_factor:
            shard.mul_(self._across.size)  # what is set_gradient_divide_factor's stays a sum over replicas
        layout = replace(group.layout, dtype=shard.dtype)  # gradients may be reduced in another one
        if layout not in group.checked:
            self.compressor.check(layout)
            group.checked.add(layout)
        job = BucketJob(self.step, layout, shard, self._memory.slot(layout))
        try:
            self._reduction.divide(job)
            assert job.piece is not None
            for stage in self._stages:
                stage.run(job.piece, self._across)
        except ConnectionBroken as error:
            raise CommError(
                f"step {self.step}, {group.name}: replica {self._across.rank} could not average with the others: "
                f"{error}; a rank has ended, or took other steps"
            ) from error
        self._reduction.write_back(job)

    def _begin(self, index: int) -> None:
        """Note that a pass has begun, or that a module is reduced twice in one, which makes two steps."""
        task = torch._C._current_graph_task_id()
        if task == self._pass and index not in self._seen:
            self._seen.add(index)
            return
        if task == self._pass:
            self._end()
        else:
            if self._seen:  # a pass broke off: what it wrote must not hold
                self._settle(finite=False)
            self._loss_scale.follow(self._memory)
            engine = Variable._execution_engine
            # A callback of a callback comes after FSDP2's own, which may reduce the last modules.
            engine.queue_callback(lambda: engine.queue_callback(self._end))
        self._pass, self._seen = task, {index}
        self.step += 1

    def _end(self) -> None:
        """Settle the memory: a step is void on all shards of a replica if it is on one."""
        if not self._seen:
            return
        self._seen = set()
        finite = self._memory.finite()
        self._settle(self._within.all_true(finite) if self.error_feedback else finite)

    def _settle(self, finite: bool) -> None:
        self._memory.note(torch.tensor([finite], device=self._device))
        self._memory.settle()

    # -- saving and the end ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals by parameter, and the step; save it on each rank, between steps."""
        return {**self._memory.state_dict(), "step": self.step, "scale": self._loss_scale.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved memory, on every rank.

        Raises:
            InvalidArgument: if it is of another version; at the next step, if it is of another model or mesh.
        """
        self._memory.load_state_dict(state)
        self.step, self._loss_scale.value = state["step"], state.get("scale", 1.0)

    def close(self) -> None:
        """Free the groups. Backward passes of the model are an error then: replicas would drift apart."""
        if not self._closed:
            self._closed = True
            self._disconnect()

    def _disconnect(self) -> None:
        self._across.close()
        self._within.close()
        self._between.close()


@dataclass
class ShardGroup:
    """One FSDP2 module, and its rank's shards end to end."""

    name: str
    module: FSDPModule
    layout: Layout
    checked: set[Layout] = field(default_factory=set)
    kept: torch.Tensor | None = None
    """The sum of shards that are not averaged over replicas yet (`set_requires_all_reduce(False)`)."""

    def accumulated(self, shard: torch.Tensor) -> bool:
        """Add what was kept to a shard and return True; or keep the shard, where the next pass is to be averaged."""
        total = shard if self.kept is None else shard.add_(self.kept)
        is_due = all(group.all_reduce_grads for group in _param_groups(self.module))
        self.kept = None if is_due else total.clone()
        if not is_due:
            shard.zero_()  # FSDP2 adds it to the gradients now
        return is_due

    @property
    def own_factor(self) -> bool:
        """Return whether the user set what gradients are divided by, over all ranks."""
        return any(group.gradient_divide_factor is not None for group in _param_groups(self.module))


def _param_groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # newer: a module may have several, on several meshes
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def shard_groups(model: nn.Module) -> list[ShardGroup]:
    """Return the FSDP2 modules with parameters to train; raise InvalidArgument where a hook could not serve one."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    modules: list[tuple[str, FSDPModule, list[Any]]] = []
    for name, module in model.named_modules():
        groups = _param_groups(module) if isinstance(module, FSDPModule) else []
        if len(groups) > 1:
            raise InvalidArgument(
                f"FSDP2 has no hook for a module whose parameters are on several meshes, got {len(groups)} of them in "
                f"{name or 'the model'}; give all parameters of it one mesh"
            )
        shards = [shard for group in groups for shard in group.fsdp_params if shard.sharded_param.requires_grad]
        if shards:
            modules.append((name or "the model", module, shards))
    if not modules:
        raise InvalidArgument(
            "the model must have FSDP2 modules with parameters to train, got none; call fully_shard first"
        )
    return [
        ShardGroup(
            name,
            module,
            Layout(
                index,
                tuple(names[id(shard.sharded_param)] for shard in shards),
                tuple(torch.Size(shard.padded_sharded_param_size) for shard in shards),
                shards[0].sharded_param.dtype,
                index == len(modules) - 1,
            ),
        )
        for index, (name, module, shards) in enumerate(modules)
    ]


def check_mesh(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise InvalidArgument unless the model is sharded over the second dimension of a mesh of two."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2:
        raise InvalidArgument(f"mesh must be a DeviceMesh of two dimensions, replicas and shards, got {mesh!r}")
    shards = torch.distributed.get_process_group_ranks(mesh.get_group(1))
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            if parameter.requires_grad:
                raise InvalidArgument(f"all parameters must be sharded by fully_shard, got a plain {name!r}")
            continue
        own = parameter.device_mesh
        if own.ndim == 2:
            raise InvalidArgument(
                f"{name!r} is sharded over two dimensions, where FSDP2 all-reduces between replicas by itself and "
                'calls a hook only after it; pass fully_shard(..., mesh=mesh["shard"]) and the whole mesh to FSDPComm'
            )
        if own.ndim != 1 or own.mesh.flatten().tolist() != shards:
            raise InvalidArgument(
                f"parameters must be sharded over the second dimension of the mesh, ranks {shards}, got {name!r} over "
                f"{own.mesh.tolist()}; pass the mesh that fully_shard got a part of"
            )


def contents(model: nn.Module) -> int:
    """Return a checksum of the weights in this rank's shards."""
    total = 0
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if not local.is_meta and local.numel():
            values = local.detach().contiguous().view(-1).view(torch.uint8)
            total = zlib.crc32(f"{name}{values.sum(dtype=torch.int64).item()}".encode(), total)
    return total
