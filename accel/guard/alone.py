"""Calls of a model that this rank makes alone: the others take no part, since they may be at another step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

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
