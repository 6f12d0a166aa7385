"""`undecorate`: take mixed precision off again, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from accel.amp import weights
from accel.amp.border import border_of
from accel.amp.bypass import BypassCheck
from accel.amp.master_option import MasterOption
from accel.amp.masters import MasterWeights
from accel.amp.moments import MomentDtypes
from accel.errors import InvalidArgument


@dataclass
class Decoration:
    """What a call of `decorate` has put on its models and optimizers."""

    handles: list[RemovableHandle]
    casts: dict[nn.Module, weights.Casts]
    masters: list[MasterWeights]
    options: list[MasterOption]
    moments: list[MomentDtypes]
    check: BypassCheck | None
    is_distributed: bool
    """A model was in `DistributedDataParallel` then, whose buckets are of 16 bits."""


def undecorate(models: Any) -> Any:
    """Take off what `decorate` has put on models and their optimizers, in place.

    Weights are float32 again, with the bits of their master weights; those that no optimizer trains stay rounded.
    Gradients that are there are cast. What was decorated by one call goes together.

    Args:
        models: one, or several; those that are not decorated are left as they are.

    Returns:
        What was passed.

    Raises:
        InvalidArgument: between a backward pass and its step, while gradients are scaled; for a model in
            `DistributedDataParallel`. Nothing has been changed then.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> before = model.weight.clone()
        >>> model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.bfloat16)
        >>> torch.equal(undecorate(model).weight, before)
        True
    """
    given = list(models) if isinstance(models, Sequence) else [models]
    for model in given:
        _check(model)
    for model in given:
        _undo(model)
    return models


def _decoration_of(model: nn.Module) -> Decoration | None:
    border = border_of(model)
    return None if border is None else border.decoration


def _check(model: nn.Module) -> None:
    decoration = _decoration_of(model)
    if isinstance(model, DistributedDataParallel) or (decoration is not None and decoration.is_distributed):
        raise InvalidArgument(
            "a model must be undecorated before it is wrapped: its gradients' buckets are of 16 bits. "
            "Found: DistributedDataParallel."
        )
    for masters in [] if decoration is None else decoration.masters:
        masters.recover()
    if decoration is not None and not all(masters.is_between_steps for masters in decoration.masters):
        raise InvalidArgument("a model must be undecorated between two steps. Found: gradients that wait for theirs.")


def _undo(model: nn.Module) -> None:
    decoration = _decoration_of(model)
    if decoration is None:  # never decorated, or undone with another that was decorated by the same call
        return
    latest = {p: value for masters in decoration.masters for p, value in masters.remove().items()}
    for handle in decoration.handles:
        handle.remove()
    for option in decoration.options:
        option.remove()
    for other, casts in decoration.casts.items():
        weights.uncast(other, casts, latest)
    for moments in decoration.moments:
        moments.follow()
    if decoration.check is not None:
        decoration.check.remove()
