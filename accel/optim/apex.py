"""NVIDIA's apex as the backend of a step: its optimizer runs on our parameter groups and our state."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import torch

from accel.errors import InvalidArgument

if TYPE_CHECKING:
    from accel.optim.base import MultiTensorOptimizer

_SYMBOLS = {"sgd": "FusedSGD", "adam": "FusedAdam", "lamb": "FusedLAMB"}
_LAMB_OPTIONS = ("adam_w_mode", "max_grad_norm", "use_nvlamb")
_INSTALL = "Build it from https://github.com/NVIDIA/apex, or leave backend= out."


def symbol(name: str) -> Any:
    """Return a class of `apex.optimizers`.

    Raises:
        InvalidArgument: if apex is not installed, or what is installed has no such class that can be imported.
    """
    if importlib.util.find_spec("apex") is None:
        raise InvalidArgument(f"accel.optim: backend='apex' needs NVIDIA's apex, which is not installed. {_INSTALL}")
    try:
        return getattr(importlib.import_module("apex.optimizers"), name)
    except Exception as error:  # another project has the name, and builds for another torch fail in many ways
        raise InvalidArgument(
            f"accel.optim: backend='apex' needs apex.optimizers.{name}. Found: an apex that is unusable "
            f"({type(error).__name__}: {error}). {_INSTALL}"
        ) from error


class ApexStep:
    """Runs an optimizer of apex on the groups and the state of one of ours.

    Args:
        optimizer: of SGD, Adam or LAMB, all its parameters float32 and on a GPU.

    Raises:
        InvalidArgument: if apex can't be used, or has no kernels for these parameters or options.
    """

    def __init__(self, optimizer: MultiTensorOptimizer) -> None:
        self._optimizer = optimizer
        apex_class = symbol(_SYMBOLS[optimizer.kind])
        self._check()
        group = optimizer.param_groups[0]
        options = {name: group[name] for name in _LAMB_OPTIONS} if optimizer.kind == "lamb" else {}
        if optimizer.kind == "adam":
            options["adam_w_mode"] = bool(group["decoupled_weight_decay"])
        params = [p for each in optimizer.param_groups for p in each["params"]]
        inner = apex_class(params, lr=group["lr"], **options)
        inner.param_groups, inner.state = optimizer.param_groups, optimizer.state
        for each in optimizer.param_groups:
            each.setdefault("bias_correction", True)
        self._inner = inner

    def _check(self) -> None:
        optimizer = self._optimizer
        owner = type(optimizer).__name__
        lacking = {"amsgrad": "amsgrad", "maximize": "maximize"}
        if optimizer.kind != "lamb":
            lacking["max_grad_norm"] = "clipping"
        for group in optimizer.param_groups:
            for name in filter(group.get, lacking):
                raise InvalidArgument(f"{owner}: apex has no {lacking[name]}. Found: {name}={group[name]}. {_INSTALL}")
            for p in group["params"]:
                if p.device.type != "cuda" or p.dtype != torch.float32:
                    raise InvalidArgument(
                        f"{owner}: backend='apex' takes float32 parameters on a GPU. Found: {p.dtype} on {p.device}. "
                        "Leave backend= out."
                    )

    def step(self) -> None:
        """Run one step."""
        self._inner.step()

    def write_steps(self) -> None:
        """Write the counters of groups, which apex has, to each parameter's state, as torch has them."""
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                if "step" in group and p in self._optimizer.state:
                    self._optimizer.state[p]["step"] = torch.tensor(float(group["step"]))

    def read_steps(self) -> None:
        """Take the counters of groups from a state that was loaded."""
        self._inner.param_groups, self._inner.state = self._optimizer.param_groups, self._optimizer.state
        for group in self._optimizer.param_groups:
            steps = [self._optimizer.state[p]["step"] for p in group["params"] if "step" in self._optimizer.state[p]]
            if steps:
                group["step"] = int(steps[0])
