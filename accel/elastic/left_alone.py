"""Trainings that accel was switched off for (`ACCEL=0`, `disabled()`): what their scripts ask is still answered."""

from __future__ import annotations

import contextlib
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.optim import Optimizer


class StepCount:
    """Count an optimizer's steps: without accel each is worth one of the user's batch.

    Args:
        optimizer: None counts nothing.
    """

    def __init__(self, optimizer: Optimizer | None) -> None:
        self.progress = 0.0
        """Steps so far."""
        if optimizer is not None:
            optimizer.register_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self.progress += 1.0


_loaders: WeakSet[Any] = WeakSet()
_models: WeakKeyDictionary[nn.Module, StepCount] = WeakKeyDictionary()


def leave_alone(model: Any, loader: Any, optimizer: Any) -> None:
    """Note what was passed to `accel.optimize` while it was switched off."""
    with contextlib.suppress(TypeError):  # a list, say, can't be noted, and is no loader of an elastic training
        _loaders.add(loader)
    if isinstance(model, nn.Module):
        _models[model] = StepCount(optimizer if isinstance(optimizer, Optimizer) else None)


def take_back(model: Any, loader: Any) -> None:
    """Forget both: they are passed again, and accel is on."""
    with contextlib.suppress(TypeError):
        _loaders.discard(loader)
        _models.pop(model, None)


def is_left_alone(loader: Any) -> bool:
    """Return whether a loader was passed while accel was switched off."""
    try:
        return loader in _loaders
    except TypeError:
        return False


def steps_of(model: nn.Module) -> StepCount | None:
    """Return the steps of a model that was passed while accel was switched off; None of any other."""
    return _models.get(model)
