"""Float32 master weights under local SGD: they are averaged, and the 16-bit parameters that they round to follow.

Steps that 16 bits have no room for are in the masters alone. If the parameters were averaged, each rank's masters would
take the mean over only where it differs from their own rounding: ranks would drift apart, and small steps be lost.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_MASTER = "master"
"""The field of a parameter's state where `accel.optim` keeps its master weights."""
_OPTION = "master_weights"
"""The option of a group whose optimizer makes masters at the first step that a parameter has a gradient."""
_HALF = frozenset({torch.float16, torch.bfloat16})


def is_master(field: str, parameter: Tensor) -> bool:
    """Return whether a field of a parameter's state holds its master weights."""
    return field == _MASTER and parameter.dtype in _HALF


@torch.no_grad()
def masters_of(optimizer: torch.optim.Optimizer) -> dict[Tensor, Tensor]:
    """Return the master weights of 16-bit parameters, after taking over what others wrote to these."""
    masters: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.dtype not in _HALF:
                continue
            state = optimizer.state.get(parameter, {})
            if _MASTER not in state and group.get(_OPTION):  # a parameter that this rank alone has not used yet
                state = optimizer.state[parameter]
                state[_MASTER] = torch.empty_like(parameter, dtype=torch.float32).copy_(parameter)
            if _MASTER in state:
                masters[parameter] = _following(state[_MASTER], parameter)
    return masters


def _following(master: Tensor, parameter: Tensor) -> Tensor:
    # What still rounds to the parameter is kept: it has the bits that the parameter has not.
    same = master.to(parameter.dtype) == parameter
    return master.copy_(torch.where(same, master, parameter.to(master.dtype)))


@torch.no_grad()
def round_off(masters: Mapping[Tensor, Tensor]) -> None:
    """Set parameters to what their master weights round to."""
    for parameter, master in masters.items():
        parameter.copy_(master)
