"""What a decorated optimizer's step refuses: gradients that are scaled otherwise, lists of parameters of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from accel.errors import InvalidArgument


def keeps_own_lists(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to update parameters of lists of its own, beside those of its groups.

    Master weights that stand in the groups would then be left alone.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return True
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        return True
    return any(_has_own_groups(part, optimizer) for part in _parts(optimizer))


def _parts(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that an optimizer hands its step to."""
    held: list[object] = []
    for value in vars(optimizer).values():
        held += value.values() if type(value) is dict else value if type(value) in (list, tuple) else [value]
    return [each for each in held if isinstance(each, Optimizer) and each is not optimizer]


def _has_own_groups(part: Optimizer, whole: Optimizer) -> bool:
    ours = [id(group) for group in whole.param_groups]
    return any(id(group) not in ours for group in part.param_groups)


def check_came_through(there: Sequence[Tensor], came_through: bool) -> None:
    """Raise InvalidArgument if gradients of a step are there, and nothing came through the loss scale."""
    if there and not came_through:
        raise InvalidArgument(
            "the gradients must come through the output of the decorated model, where the loss scale is applied. "
            "Found: gradients of a step in which nothing did. Decorate the module that the loop calls, or scale "
            "the loss by torch.amp.GradScaler and pass loss_scale=None."
        )


def check_unchanged(was_changed: bool, scale: Tensor, optimizer: Optimizer) -> None:
    """Raise InvalidArgument if a gradient was changed that is still scaled."""
    if was_changed:
        raise InvalidArgument(
            f"gradients must not be changed while they are scaled, by {float(scale):g} now. Found: one that was, "
            "between backward and step. Clip or change those of "
            f"accel.amp.master_params({type(optimizer).__name__.lower()}), which are not scaled."
        )


def check_not_written(parameter: Tensor | None, optimizer: Optimizer) -> None:
    """Raise InvalidArgument if a parameter was written to while its master weights stood in for it."""
    if parameter is not None:
        raise InvalidArgument(
            "an optimizer with master weights must update what stands in its param_groups during its step. Found: "
            f"{type(optimizer).__name__}, whose step has written to a 16-bit parameter of shape "
            f"{tuple(parameter.shape)}, which it has from a list of its own. Use O1."
        )
