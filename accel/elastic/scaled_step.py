"""An optimizer's step with other hyper-parameters than those of its groups, which nobody else gets to see.

The step runs on a stand-in: an object of a class derived from the optimizer's own that has the same attributes, but
shows other values in `param_groups`. The optimizer's own groups keep theirs. So there is nothing to put back, whether
the step returns or raises, and schedulers, closures, hooks and checkpoints see the user's values at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from accel.elastic.scaling_rules import Multipliers


class ScaledGroup(dict[str, Any]):
    """A parameter group as the step sees it: some values are others; what the step writes to the rest goes through.

    Optimizers keep counters in their groups. A value that the step writes over a scaled one is dropped.
    """

    def __init__(self, base: dict[str, Any], scaled: Mapping[str, Any]) -> None:
        super().__init__({**base, **scaled})
        self._base, self._scaled = base, scaled

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if name not in self._scaled:
            self._base[name] = value

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        if name not in self._scaled:
            del self._base[name]

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Return a value, after setting it where there is none."""
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *values: Any, **more: Any) -> None:
        """Set several values."""
        for name, value in dict(*values, **more).items():
            self[name] = value

    def __ior__(self, values: Any) -> ScaledGroup:  # type: ignore[override,misc]
        self.update(values)
        return self

    def pop(self, name: str, *default: Any) -> Any:
        """Take a value out."""
        value = super().pop(name, *default)
        if name not in self._scaled:
            self._base.pop(name, None)
        return value


class WatchedGroup(ScaledGroup):
    """The same, and what the step reads is looked at: AdamW reads 66 values a step of 18 parameters."""

    def __init__(self, base: dict[str, Any], scaled: Mapping[str, Any], note_read: Callable[[], None]) -> None:
        super().__init__(base, scaled)
        self._note_read = note_read

    def __getitem__(self, name: str) -> Any:
        if name == "lr":
            self._note_read()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or the default."""
        if name == "lr":
            self._note_read()
        return super().get(name, default)


class ScaledStep:
    """Makes the objects on which an optimizer's steps run.

    Args:
        optimizer: whose step.
        multipliers: returns those of each of its groups, in order.
    """

    def __init__(self, optimizer: Optimizer, multipliers: Callable[[], Iterable[Multipliers]]) -> None:
        self._optimizer, self._multipliers = optimizer, multipliers
        self.was_read = False
        """Whether a step has asked for a learning rate; none is watched for that any more."""
        own = type(optimizer)
        names = {"param_groups": property(self._groups, self._set_groups), "__module__": own.__module__}
        # Of the same name, which error messages show.
        self._kind = type(own.__name__, (own,), {**names, "__qualname__": own.__qualname__})

    def make(self) -> Optimizer:
        """Return what stands in for the optimizer in one step."""
        made: Any = object.__new__(self._kind)
        made.__dict__ = self._optimizer.__dict__
        return made  # type: ignore[no-any-return]

    def is_one(self, optimizer: object) -> bool:
        """Return whether a step runs on a stand-in already, as where a class calls its base's step in its own."""
        return isinstance(optimizer, self._kind)

    def _groups(self, _: object) -> list[ScaledGroup]:
        # Made when the step asks for it, after all hooks, which may change the groups.
        groups = self._optimizer.param_groups
        scaled = [
            scaled_values(self._optimizer, group, own) for group, own in zip(groups, self._multipliers(), strict=True)
        ]
        if self.was_read:
            return list(map(ScaledGroup, groups, scaled))
        return [WatchedGroup(group, values, self._read) for group, values in zip(groups, scaled, strict=True)]

    def _set_groups(self, _: object, groups: list[dict[str, Any]]) -> None:
        self._optimizer.param_groups = groups

    def _read(self) -> None:
        self.was_read = True


def scaled_values(optimizer: Optimizer, group: Mapping[str, Any], by: Multipliers) -> dict[str, Any]:
    """Return the values of a group that a step sees in place of the group's own.

    Args:
        optimizer: whose class says what is a moving average: `betas`, and RMSprop's `alpha`.
        group: its learning rate and eps may be numbers or tensors, which stay tensors.
        by: what to multiply by.
    """
    values = {} if by.lr == 1 else {"lr": group["lr"] * by.lr}
    if by.averages != 1:
        if "betas" in group:
            values["betas"] = tuple(_shorter(beta, by.averages) for beta in group["betas"])
        elif isinstance(optimizer, torch.optim.RMSprop):
            values["alpha"] = _shorter(group["alpha"], by.averages)
    if by.eps != 1 and isinstance(group.get("eps"), float | int | torch.Tensor):
        values["eps"] = group["eps"] * by.eps
    return values


def _shorter(beta: Any, factor: float) -> Any:
    """Return max(0, 1 − factor·(1 − β))."""
    shorter = 1 - factor * (1 - beta)
    return shorter.clamp(min=0) if isinstance(shorter, torch.Tensor) else max(0.0, shorter)
