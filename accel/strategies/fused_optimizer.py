"""fused_optimizer: let torch's own optimizer use its fused or foreach path instead of a loop over parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accel.profiler.bottleneck import Bottleneck
from accel.run import Run
from accel.strategies.base import Exactness, Strategy

_FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


class FusedOptimizer(Strategy):
    """Set `fused` (or `foreach`) in the parameter groups of torch's optimizers.

    The optimizer stays the same object with the same state; only the path of its next step changes. Settings: `fused`
    where torch has it, and `foreach`.
    """

    name = "fused_optimizer"
    summary = "one fused or foreach update instead of one per parameter"
    treats = frozenset({Bottleneck.OPTIMIZER, Bottleneck.LAUNCH})
    exactness = Exactness.REORDERED
    touches = frozenset({"optimizer"})
    phase = "optimizer"

    def __init__(self) -> None:
        self._before: list[tuple[dict[str, Any], Any, Any]] = []
        self._hooks: list[RemovableHandle] = []

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: no optimizer, or none with a path to switch."""
        if not run.optimizers:
            return "no optimizer of the model has been seen"
        reasons = [reason for optimizer in run.optimizers if (reason := _refusal(optimizer))]
        return "; ".join(reasons) if len(reasons) == len(run.optimizers) else ""

    def settings(self, run: Run) -> list[Any]:
        """Return `fused` where every optimizer has it, then `foreach`."""
        able = [o for o in run.optimizers if not _refusal(o)]
        return (["fused"] if all(_has_fused(o) for o in able) else []) + ["foreach"]

    def enable(self, run: Run, setting: Any) -> None:
        """Set the path, and move step counters where the fused path wants them."""
        for optimizer in run.optimizers:
            if _refusal(optimizer):
                continue
            for group in optimizer.param_groups:
                self._before.append((group, group["foreach"], group.get("fused")))
                group["foreach"] = setting == "foreach"
                if "fused" in group:
                    group["fused"] = setting == "fused"
            if setting == "fused":
                _place_steps(optimizer, on_device=True)
            # A checkpoint is the plain loop's: it says nothing of the path.
            self._hooks.append(optimizer.register_state_dict_post_hook(self._plain_checkpoint))

    def _plain_checkpoint(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        before = {id(group): values for group, *values in self._before}
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            if id(group) in before:
                saved["foreach"] = before[id(group)][0]
                if "fused" in saved:
                    saved["fused"] = before[id(group)][1]

    def disable(self, run: Run) -> None:
        """Set the path that was set before."""
        for group, foreach, fused in self._before:
            group["foreach"] = foreach
            if "fused" in group:
                group["fused"] = fused
        self._before.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for optimizer in run.optimizers:
            if not _refusal(optimizer):
                _place_steps(optimizer, on_device=False)

    def describe(self, setting: Any) -> str:
        """Return `fused` or `foreach`."""
        return str(setting)


def _refusal(optimizer: Optimizer) -> str:
    kind = type(optimizer)
    if kind.__module__.split(".")[0] != "torch":
        return f"{kind.__name__} is not one of torch's own"
    groups = optimizer.param_groups
    if not all("foreach" in group for group in groups):
        return f"{kind.__name__} has no fused or foreach path"
    if any(group.get("fused") or group.get("foreach") is not None for group in groups):
        return f"the path of {kind.__name__} was set by hand"
    if any(group.get("differentiable") or group.get("capturable") for group in groups):
        return f"{kind.__name__} is differentiable or capturable"
    if any(p.is_sparse or (p.grad is not None and p.grad.is_sparse) for group in groups for p in group["params"]):
        return f"{kind.__name__} has sparse gradients"
    return ""


def _has_fused(optimizer: Optimizer) -> bool:
    return type(optimizer).__name__ in _FUSED and all(
        p.is_floating_point() and p.device.type in _FUSED_DEVICES for g in optimizer.param_groups for p in g["params"]
    )


def _place_steps(optimizer: Optimizer, *, on_device: bool) -> None:
    """Move the step counters: the fused path wants them on the parameter's device, the others on the CPU."""
    for parameter, state in optimizer.state.items():
        step = state.get("step")
        if isinstance(step, torch.Tensor) and isinstance(parameter, torch.Tensor):
            state["step"] = step.to(parameter.device if on_device else "cpu")
