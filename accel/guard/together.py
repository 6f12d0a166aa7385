"""Calls of a sharded model (FSDP2) that all ranks make together, at the same step boundary.

No rank can call such a model alone, or has a whole gradient: in each call the ranks gather weights, and after it each
gets its shard of the mean gradient. So a replay is made on all ranks at once, through FSDP2's own hooks and
collectives, and each rank compares its outputs and its shards. Once they have agreed to begin, none may stay away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from accel.guard.alone import is_sharded as is_sharded
from accel.guard.alone import local
from accel.profiler.interruptions import ours

SPREAD = "the model is sharded (FSDP, tensor parallel), which replays can't compare"


class OutOfStep(BaseException):
    """A rank failed in a call that all ranks were making together; it can't go on with the loop, nor can the others.

    No `Exception`, because nothing may take it for an error that the loop outlives.
    """


def why_not_together(model: nn.Module) -> str:
    """Say why ranks can't make a sharded model's calls again together; '' if they can."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    if not isinstance(model, FSDPModule):
        return SPREAD
    groups, shards = _groups(model), fsdp_parameters(model)
    own = {id(shard.sharded_param) for shard in shards if not shard.is_dtensor}
    if any(isinstance(p, DTensor) and id(p) not in own for p in model.parameters()):
        return SPREAD
    if any(getattr(shard.sharded_param, "_post_accumulate_grad_hooks", None) for shard in shards):
        return "hooks of the loop's act on each gradient of the sharded model, and replays would run them, too"
    if any(group._all_reduce_hook is not None for group in groups):
        return "a hook of the loop's reduces the sharded model's gradients, and replays would run it, too"
    if not all(group.reduce_grads and group.all_reduce_grads for group in groups):
        return "the last backward pass of a step exchanges no gradients (set_requires_gradient_sync)"
    return ""


def reshard(model: nn.Module) -> None:
    """Give up the weights that a sharded model has gathered, as those of its root after an evaluation."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_resharded(model: nn.Module) -> bool:
    """Tell whether no weights of a sharded model are gathered now."""
    from torch.distributed.fsdp import FSDPModule

    modules = (module for module in model.modules() if isinstance(module, FSDPModule))
    return all(group.is_sharded for module in modules for group in _param_groups(module))


def sent_back(model: nn.Module, outputs: list[Tensor], sent: list[Tensor], inputs: list[Tensor]) -> list[Tensor | None]:
    """Return this rank's gradients, which FSDP2's hooks reduce into `.grad`; what stands there is put back."""
    before = [tensor.grad for tensor in inputs]
    try:
        for tensor in inputs:
            tensor.grad = None
        torch.autograd.backward(outputs, sent)
        return [None if tensor.grad is None else local(tensor.grad) for tensor in inputs]
    finally:
        for tensor, gradient in zip(inputs, before, strict=True):
            tensor.grad = gradient
        reshard(model)


@contextlib.contextmanager
def in_step() -> Iterator[None]:
    """Make replays on all ranks; an error in one of them is the end, as the others wait within a collective.

    Raises:
        OutOfStep: if this rank's fails.
    """
    try:
        yield
    except ours() as error:
        raise OutOfStep(
            "this rank failed in a call of the sharded model that all ranks made again to compare a strategy, and "
            f"can't go on: {type(error).__name__}: {error}; name the strategy in disable="
        ) from error


def fsdp_parameters(model: nn.Module) -> list[Any]:
    """Return what FSDP2 keeps of each parameter that it shards, in the same order on all ranks."""
    return [parameter for group in _groups(model) for parameter in group.fsdp_params]


def _groups(model: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [group for module in model.modules() if isinstance(module, FSDPModule) for group in _param_groups(module)]


def _param_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # newer: a module may have several, on several meshes
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
