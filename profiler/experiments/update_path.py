"""The path an optimizer's step takes: parameter by parameter, foreach or fused; and switching it between two steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def refusal(optimizer: Optimizer) -> str:
    """Say why the path can't be switched, '' if it can.

    Args:
        optimizer: any; only torch's own have paths.
    """
    kind = type(optimizer)
    if kind.__module__.split(".")[0] != "torch":
        return f"{kind.__name__} is not one of torch's own"
    groups = optimizer.param_groups
    if not all("foreach" in group for group in groups):
        return f"{kind.__name__} has no fused or foreach path"
    if any(group.get("differentiable") or group.get("capturable") for group in groups):
        return f"{kind.__name__} is differentiable or capturable"
    if any(p.is_sparse or (p.grad is not None and p.grad.is_sparse) for group in groups for p in group["params"]):
        return f"{kind.__name__} has sparse gradients"
    return ""


def set_by_hand(optimizer: Optimizer) -> bool:
    """Return whether the loop chose the path itself."""
    return any(group.get("fused") or group.get("foreach") is not None for group in optimizer.param_groups)


def updates_at_once(optimizer: Optimizer) -> bool:
    """Return whether the loop chose the fused or the foreach path."""
    return any(group.get("fused") or group.get("foreach") for group in optimizer.param_groups)


def has_fused(optimizer: Optimizer) -> bool:
    """Return whether torch has a fused path for this optimizer and all its parameters."""
    return type(optimizer).__name__ in _FUSED and all(
        p.is_floating_point() and p.device.type in _FUSED_DEVICES for g in optimizer.param_groups for p in g["params"]
    )


class Paths:
    """Switches the paths of some optimizers, and back.

    Attributes:
        saved: id of a parameter group → its original `foreach` and `fused`; empty while nothing is switched.
    """

    def __init__(self) -> None:
        self.saved: dict[int, tuple[Any, Any]] = {}
        self._switched: list[Optimizer] = []

    def switch(self, optimizers: Iterable[Optimizer], *, fused: bool) -> None:
        """Take the fused path, or foreach."""
        for optimizer in optimizers:
            self._switched.append(optimizer)
            for group in optimizer.param_groups:
                self.saved[id(group)] = group["foreach"], group.get("fused")
                _set(group, not fused, fused)
            if fused:
                _move_step_counters(optimizer, on_device=True)

    def restore(self) -> None:
        """Restore the original paths."""
        for optimizer in self._switched:
            for group in optimizer.param_groups:
                if id(group) in self.saved:
                    _set(group, *self.saved[id(group)])
            _move_step_counters(optimizer, on_device=False)
        self._switched.clear()
        self.saved.clear()


def _set(group: dict[str, Any], foreach: bool | None, fused: bool | None) -> None:
    group["foreach"] = foreach
    if "fused" in group:
        group["fused"] = fused


def _move_step_counters(optimizer: Optimizer, *, on_device: bool) -> None:
    """Move the step counters: the fused path wants them on the parameter's device, the others on the CPU."""
    for parameter, state in optimizer.state.items():
        step = state.get("step")
        if isinstance(step, Tensor) and isinstance(parameter, Tensor):
            state["step"] = step.to(parameter.device if on_device else "cpu")
