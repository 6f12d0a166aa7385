"""What FSDP2 hands to a hook: which modules, and which shards of which parameters in which order.

Of PyTorch's internals this reads a module's groups of parameters and their padded shards, which no public call returns.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accel.comm.layout import Layout
from accel.profiler.errors import InvalidArgument


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

    def of(self, dtype: torch.dtype) -> Layout:
        """Return the layout in the dtype that gradients are reduced in."""
        layout = self.layout
        return Layout(layout.index, layout.names, layout.shapes, dtype, layout.is_last)


def _modules(model: nn.Module) -> Iterator[tuple[str, FSDPModule]]:
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            yield name, module


def _param_groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # newer: a module may have several, on several meshes
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def shard_groups(model: nn.Module) -> list[ShardGroup]:
    """Return the FSDP2 modules with parameters to train; raise InvalidArgument where a hook could not serve one."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    modules: list[tuple[str, FSDPModule, list[Any]]] = []
    for name, module in _modules(model):
        groups = _param_groups(module)
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
