"""Calls of a model that this rank makes alone: the others take no part, since they may be at another step.

A model whose weights are spread over ranks can't be called so, nor can a rank compare its gradients: the graph of a
call of FSDP's has gathered weights for leaves, and each call has all ranks gather.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel.run import ranks

_OF_FORWARD = ("_join_config", "require_forward_param_sync")
"""What has a call of `DistributedDataParallel` talk to other ranks, beside the exchange of gradients: within `join()`
each call tells the ranks that have ended their batches, which would take a replay for a step; and the buffers of rank 0
are sent round. The call writes the latter attribute, too."""


@contextlib.contextmanager
def on_this_rank_alone(model: nn.Module) -> Iterator[None]:
    """Have calls of a model, and of data-parallel models within it, talk to no other rank.

    Args:
        model: a module of any kind; `no_sync()` is entered where it has one.
    """
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            is_parallel = isinstance(module, DistributedDataParallel)
            if is_parallel:
                stack.enter_context(without_forward(module))
            if is_parallel or module is model:
                no_sync: Any = getattr(module, "no_sync", contextlib.nullcontext)
                stack.enter_context(no_sync())
        yield


@contextlib.contextmanager
def without_forward(module: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in _OF_FORWARD}
    try:
        module._join_config = module._join_config._replace(enable=False)
        module.require_forward_param_sync = False
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model, or a part of it, is sharded (FSDP), or has parameters spread by tensor parallelism."""
    if not (dist.is_available() and dist.is_initialized()):  # asked at each look: all of 1,000 modules take some ms
        return False
    wrappers = _loaded("torch.distributed.fsdp", "FullyShardedDataParallel", "FSDPModule")
    spread = _loaded("torch.distributed.tensor", "DTensor")
    if wrappers and any(isinstance(module, wrappers) for module in model.modules()):
        return True
    return bool(spread) and any(isinstance(parameter, spread) for parameter in model.parameters())


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor that is spread over ranks; any other as it is."""
    spread = _loaded("torch.distributed.tensor", "DTensor")
    return tensor.to_local() if spread and isinstance(tensor, spread) else tensor  # type: ignore[attr-defined]


def talks_within_calls(model: nn.Module) -> bool:
    """Return whether ranks exchange activations or weights within a call: synchronised norms, FSDP, tensor parallel."""
    if not ranks.are_several():
        return False
    return is_sharded(model) or any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def _loaded(module: str, *names: str) -> tuple[type, ...]:
    """Return classes of a module of torch's; none if nobody has imported it, so that there are no objects of them."""
    loaded = sys.modules.get(module)
    return tuple(getattr(loaded, name) for name in names if hasattr(loaded, name))
