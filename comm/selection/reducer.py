"""Give a DDP module a new reducer: without its communication hook, or with buckets of another size.

DDP has a call for neither, but makes a new reducer when it is unpickled. That takes 8 ms for 100 MB; buckets are made
again over the next two steps. A hook that does what DDP does costs a pass over the gradients: without one, DDP divides
while it copies them into buckets. So where nothing is to be changed the hook goes.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from torch.distributed.utils import _verify_param_shape_across_processes
from torch.nn.parallel import DistributedDataParallel

_PARTS = ("_ddp_init_helper", "_build_params_for_reducer", "_build_debug_param_to_name_mapping", "bucket_bytes_cap")
_MB = 1 << 20
_SIZES = ("_bucket_config", "bucket_bytes_cap", "bucket_bytes_cap_default")
_made: weakref.WeakKeyDictionary[DistributedDataParallel, dict[str, Any]] = weakref.WeakKeyDictionary()
"""What sizes modules were made with, of those that got others since."""


def is_renewable(ddp: DistributedDataParallel) -> bool:
    """Return whether a module can get a new reducer.

    It can't where DDP holds more in it than could be made again: with a static graph, mixed precision, delayed
    all-reduces, several hooks, or within `join`.
    """
    holds_more = (
        ddp.static_graph
        or getattr(ddp, "mixed_precision", None) is not None
        or getattr(ddp, "_delay_all_reduce_params", None)
        or getattr(ddp, "_use_python_reducer", False)
        or ddp._join_config.enable
        or len(ddp._comm_hooks) > 1
    )
    return not holds_more and all(hasattr(ddp, part) for part in _PARTS)


def is_as_made(ddp: DistributedDataParallel) -> bool:
    """Return whether a module has the buckets that it was made with."""
    made = _made.get(ddp)
    return made is None or all(vars(ddp).get(name) == size for name, size in made.items())


def go_over_to(ddp: DistributedDataParallel, group: Any) -> None:
    """Make a module as if it had been made with another process group; on every rank of that.

    Its reducer may be gone already, so that it keeps nothing of the group before alive. Under torch's own
    `_update_process_group` ranks that stay keep the layout of their buckets, while one that has come begins with
    another: in the first step gradients are added up that are not of the same parameters (torch 2.13).

    Args:
        ddp: a module that is renewable, without a hook, and as it was made.
        group: the process group.
    """
    ddp.process_group = group
    parameters, _ = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    _verify_param_shape_across_processes(group, parameters)
    _renew(ddp)


def unhook(ddp: DistributedDataParallel) -> bool:
    """Make a module as if no hook had been registered; on every rank, while no backward pass is under way.

    Args:
        ddp: a module with one hook.

    Returns:
        False, and nothing has changed, unless it is renewable and has a hook.
    """
    if not is_renewable(ddp) or not ddp._comm_hooks:
        return False
    ddp._comm_hooks.clear()
    _renew(ddp)
    return True


def cap_mb(ddp: DistributedDataParallel) -> float:
    """Return the size of buckets, as `bucket_cap_mb` of DDP."""
    return float(ddp.bucket_bytes_cap) / _MB


def is_rebucketable(ddp: DistributedDataParallel) -> bool:
    """Return whether a module can get buckets of another size: it is renewable, and all but the first have one size."""
    config = getattr(ddp, "_bucket_config", None)  # since torch 2.13
    return is_renewable(ddp) and not (config is not None and config.per_bucket_bytes_caps)


def rebucket(ddp: DistributedDataParallel, bucket_cap_mb: float) -> bool:
    """Make a module as if it had got another `bucket_cap_mb`; on every rank, while no backward pass is under way.

    The first bucket is of 1 MB at most, as DDP makes it by itself; with the size that the module was made with, it is
    what it was. A hook stays.

    Args:
        ddp: the module.
        bucket_cap_mb: size of buckets, MiB, positive.

    Returns:
        False, and nothing has changed, unless it is rebucketable.

    Raises:
        ValueError: if the size is not positive.
    """
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb must be positive, got {bucket_cap_mb}")
    if not is_rebucketable(ddp):
        return False
    cap = round(bucket_cap_mb * _MB)
    made = _made.setdefault(ddp, {name: vars(ddp)[name] for name in _SIZES if name in vars(ddp)})
    vars(ddp).update(made if cap == made["bucket_bytes_cap"] else _sizes(made, cap))
    hooks = list(ddp._comm_hooks)
    ddp._comm_hooks.clear()
    _renew(ddp)
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
    return True


def _sizes(made: dict[str, Any], cap: int) -> dict[str, Any]:
    sizes = {"bucket_bytes_cap": cap, "bucket_bytes_cap_default": cap > _MB}
    if (config := made.get("_bucket_config")) is not None:
        first = min(_MB, cap)
        sizes["_bucket_config"] = dataclasses.replace(config, bucket_bytes_cap=cap, first_bucket_bytes_cap=first)
    return sizes


def _renew(ddp: DistributedDataParallel) -> None:
    of_ddp: Any = ddp
    parameters, sparse = of_ddp._build_params_for_reducer()
    names = of_ddp._build_debug_param_to_name_mapping(parameters)
    of_ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    ddp._has_rebuilt_buckets = False
