"""fused_optimizer: let torch's own optimizer use its fused or foreach path instead of a loop over parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accel.profiler.bottleneck import Bottleneck
from accel.profiler.experiments import update_path
from accel.profiler.experiments.update_path import Paths
from accel.run import Run
from accel.strategies.base import Exactness, Strategy
from accel.strategies.trial_design import TrialDesign

_NONE_LEFT = "no optimizer takes that path any more"
_REPLACED = "the loop has replaced it, or loaded a state that can't"


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

    def __init__(self) -> None:
        self._paths = Paths()
        self._hooks: list[RemovableHandle] = []

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: no optimizer, or none with a path to switch."""
        if not run.optimizers:
            return "no optimizer of the model has been seen"
        reasons = [reason for optimizer in run.optimizers if (reason := _refusal(optimizer))]
        if len(reasons) == len(run.optimizers):
            return "; ".join(reasons)
        return (
            "" if self.settings(run) else "its foreach path is torch's default on a GPU, and not all have a fused one"
        )

    def settings(self, run: Run) -> list[Any]:
        """Return `fused` where every optimizer has it, then `foreach`, which is the default on a GPU."""
        able = [o for o in run.optimizers if not _refusal(o)]
        fused = ["fused"] if all(update_path.has_fused(o) for o in able) else []
        return fused if run.cuda else [*fused, "foreach"]

    def trial_design(self, run: Run) -> TrialDesign:
        """Try it where the update is a part of the step; on a GPU the host's time in it is that of launching."""
        return TrialDesign(phase="" if run.cuda else "optimizer")

    def enable(self, run: Run, setting: Any) -> None:
        """Set the path, and move step counters where the fused path wants them."""
        able = [optimizer for optimizer in run.optimizers if not _refusal(optimizer)]
        self._paths.switch(able, fused=setting == "fused")
        # A checkpoint is the plain loop's: it says nothing of the path, to hooks of the loop's either.
        self._hooks += [
            optimizer.register_state_dict_post_hook(self._plain_checkpoint, prepend=True) for optimizer in able
        ]

    def _plain_checkpoint(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            if id(group) in self._paths.saved:
                saved["foreach"], fused = self._paths.saved[id(group)]
                if "fused" in saved:
                    saved["fused"] = fused
                if not fused:
                    _put_counters_on_cpu(state["state"], saved["params"])

    def failure(self, run: Run) -> str:
        """Say that no optimizer takes the path any more, and why."""
        optimizers = list(run.optimizers)
        if not optimizers or any(map(self._paths.switches, optimizers)):
            return ""
        return f"{_NONE_LEFT}: {self._paths.reason() or _REPLACED}"

    def disable(self, run: Run) -> None:
        """Set the path that was set before."""
        self._paths.restore()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _put_counters_on_cpu(states: dict[Any, Any], keys: Iterable[Any]) -> None:
    """Let a checkpoint's step counters be on the CPU, where a path that is not fused has them.

    torch leaves a counter that it loads where it is, and that path then waits for each of them twice in each update.
    The optimizer's own stay where they are.
    """
    counted = [key for key in keys if isinstance(states.get(key, {}).get("step"), Tensor)]
    counters = update_path.moved([states[key]["step"] for key in counted], torch.device("cpu"))
    for key, counter in zip(counted, counters, strict=True):
        states[key] = {**states[key], "step": counter}


def _refusal(optimizer: Optimizer) -> str:
    refused = update_path.refusal(optimizer)
    if not refused and update_path.set_by_hand(optimizer):
        return f"the path of {type(optimizer).__name__} was set by hand"
    return refused
