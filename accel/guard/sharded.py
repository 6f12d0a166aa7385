"""Models whose weights are spread over ranks: no rank can compare their gradients, or call them alone.

The graph of a call of FSDP's has gathered weights for leaves, not the model's parameters, so a replay finds no
gradients; and each call has all ranks gather, where the number of replays is each rank's own matter.
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from torch import nn

from accel.run import ranks


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model, or a part of it, is sharded (FSDP), or has parameters spread by tensor parallelism.

    Args:
        model: a module of any kind.
    """
    if not (dist.is_available() and dist.is_initialized()):  # asked at each look: all of 1,000 modules take some ms
        return False
    wrappers = _loaded("torch.distributed.fsdp", "FullyShardedDataParallel", "FSDPModule")
    spread = _loaded("torch.distributed.tensor", "DTensor")
    if wrappers and any(isinstance(module, wrappers) for module in model.modules()):
        return True
    return bool(spread) and any(isinstance(parameter, spread) for parameter in model.parameters())


def talks_within_calls(model: nn.Module) -> bool:
    """Return whether ranks exchange activations or weights within a call: synchronised norms, FSDP, tensor parallel.

    Args:
        model: a module of any kind.
    """
    if not ranks.are_several():
        return False
    return is_sharded(model) or any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def _loaded(module: str, *names: str) -> tuple[type, ...]:
    """Return classes of a module of torch's; none if nobody has imported it, so that there are no objects of them."""
    loaded = sys.modules.get(module)
    return tuple(getattr(loaded, name) for name in names if hasattr(loaded, name))
