"""Take a communication hook off a DDP module, which DDP itself has no call for.

A hook that does what DDP does costs a pass over the gradients: without one, DDP divides while it copies them into
buckets. So where nothing is to be changed the hook goes: DDP gets a new reducer, as it does when it is unpickled. That
takes 8 ms for 100 MB; buckets are made anew over the next two steps.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

_PARTS = ("_ddp_init_helper", "_build_params_for_reducer", "_build_debug_param_to_name_mapping")


def unhook(ddp: DistributedDataParallel) -> bool:
    """Make a module as if no hook had been registered; on every rank, while no backward pass is under way.

    Args:
        ddp: a module with one hook.

    Returns:
        False, and nothing has changed, where DDP holds more in its reducer than could be made anew: with a static
        graph, mixed precision, delayed all-reduces, several hooks, or within `join`.
    """
    holds_more = (
        ddp.static_graph
        or getattr(ddp, "mixed_precision", None) is not None
        or getattr(ddp, "_delay_all_reduce_params", None)
        or getattr(ddp, "_use_python_reducer", False)
        or ddp._join_config.enable
        or len(ddp._comm_hooks) != 1
    )
    if holds_more or not all(hasattr(ddp, part) for part in _PARTS):
        return False
    of_ddp: Any = ddp
    parameters, sparse = of_ddp._build_params_for_reducer()
    names = of_ddp._build_debug_param_to_name_mapping(parameters)
    ddp._comm_hooks.clear()
    of_ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    ddp._has_rebuilt_buckets = False
    return True
