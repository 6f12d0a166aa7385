"""Give a DDP module a new reducer: one without its communication hook.

DDP has no call for it, but makes a new reducer when it is unpickled. That takes 8 ms for 100 MB; buckets are made again
over the next two steps. A hook that does what DDP does costs a pass over the gradients: without one, DDP divides while
it copies them into buckets. So where nothing is to be changed the hook goes.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.utils import _verify_param_shape_across_processes
from torch.nn.parallel import DistributedDataParallel

_PARTS = ("_ddp_init_helper", "_build_params_for_reducer", "_build_debug_param_to_name_mapping")


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


def go_over_to(ddp: DistributedDataParallel, group: Any) -> None:
    """Make a module as if it had been made with another process group; on every rank of that.

    Its reducer may be gone already, so that it keeps nothing of the group before alive. Under torch's own
    `_update_process_group` ranks that stay keep the layout of their buckets, while one that has come begins with
    another: in the first step gradients are added up that are not of the same parameters (torch 2.13).

    Args:
        ddp: a module that is renewable, and without a hook.
        group: the process group.
    """
    ddp.process_group = group
    parameters, _ = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    _verify_param_shape_across_processes(group, parameters)
    _renew(ddp)


def unhook(ddp: DistributedDataParallel) -> bool:
    """Make a module as if no hook had been registered; on every rank, while no backward pass is under way.

    Returns:
        False, and nothing has changed, unless it is renewable and has a hook.
    """
    if not is_renewable(ddp) or not ddp._comm_hooks:
        return False
    ddp._comm_hooks.clear()
    _renew(ddp)
    return True


def _renew(ddp: DistributedDataParallel) -> None:
    of_ddp: Any = ddp
    parameters, sparse = of_ddp._build_params_for_reducer()
    names = of_ddp._build_debug_param_to_name_mapping(parameters)
    of_ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    ddp._has_rebuilt_buckets = False
