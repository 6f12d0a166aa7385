"""A few small collectives of the hooks' channel, compared with torch's own, before gradients go by it."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from accel.comm.engine.binding import Binding
from accel.comm.ranks.channel import GlooChannel, NcclChannel

_ELEMENTS = 1024
_APART = 4096.0
"""Beyond all elements: whole numbers that floats hold exactly, so that sums are equal in any order."""


def self_test(binding: Binding, timeout: timedelta) -> str:
    """Return which collectives of the hooks' channel give other numbers than torch's own; the same on every rank.

    Args:
        binding: of the model whose gradients are to go by it.
        timeout: of each collective.
    """
    kind: type[GlooChannel] | type[NcclChannel] = NcclChannel if binding.device.type == "cuda" else GlooChannel
    size, rank, group = binding.size, binding.rank, binding.group
    own = torch.arange(_ELEMENTS, device=binding.device, dtype=torch.float32) + rank
    total, all_own = own.clone(), [torch.empty_like(own) for _ in range(size)]
    dist.all_reduce(total, group=group)
    dist.all_gather(all_own, own, group=group)
    channel = kind(PrefixStore("self-test", binding.store), range(size), rank, timeout)
    try:
        summed, gathered, received = own.clone(), *([torch.empty_like(own) for _ in range(size)] for _ in range(2))
        channel.all_reduce(summed)
        channel.all_gather(own, gathered)
        channel.exchange([own + _APART * to for to in range(size)], received)
        others = [each for each in range(size) if each != rank]
        is_equal = {
            "all_reduce": torch.equal(summed, total),
            "all_gather": all(map(torch.equal, gathered, all_own)),
            "exchange": all(torch.equal(received[each], all_own[each] + _APART * rank) for each in others),
        }
    finally:
        channel.close()
    wrong = torch.tensor([float(not equal) for equal in is_equal.values()], device=binding.device)
    dist.all_reduce(wrong, dist.ReduceOp.MAX, group=group)
    names = [name for name, count in zip(is_equal, wrong.tolist(), strict=True) if count]
    return f"{' and '.join(names)} of {kind.__name__} gave other numbers than torch's own" if names else ""
