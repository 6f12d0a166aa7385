"""Master weights of several ranks: all begin with those of the first, as weights in `DistributedDataParallel` do."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.amp.masters import MasterWeights

_BUCKET = 250 * 2**20
"""Bytes that are sent at once, as DistributedDataParallel has it."""


class SharedMasters:
    """Sends the master weights of a decorated model that is wrapped afterwards: the wrapper knows only 16 bits of each.

    In the first call within the wrapper, which all ranks do; the wrapper itself takes no hook, and is not there before.

    Args:
        masters: of the optimizers that train the model.
    """

    def __init__(self, masters: Sequence[MasterWeights]) -> None:
        self._masters = masters
        self._wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    def begin_call(self, model: nn.Module) -> None:
        """Be told that a call of the model begins."""
        wrapper: Any = DistributedDataParallel._active_ddp_module
        if wrapper is None or wrapper in self._wrappers or not torch.is_grad_enabled():
            return
        self._wrappers.add(wrapper)
        if wrapper.process_group.size() > 1 and any(part is model for part in wrapper.modules()):
            self._send(model, wrapper)

    @torch.no_grad()
    def _send(self, model: nn.Module, wrapper: Any) -> None:
        sent = {id(p) for p in wrapper._module_parameters}
        params = [p for p in model.parameters() if id(p) in sent]
        masters = {p: (each, own) for p in params for each in self._masters if (own := each.follow(p)) is not None}
        if masters:
            broadcast: Any = dist._broadcast_coalesced  # type: ignore[attr-defined]
            broadcast(wrapper.process_group, [own for _, own in masters.values()], _BUCKET, 0)
        for p, (owner, own) in masters.items():
            p.copy_(own)
            owner.agree([p])
