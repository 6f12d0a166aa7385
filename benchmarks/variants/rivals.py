"""Rivals that install: what their users write instead of accel's line."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

from torch import Tensor

from benchmarks.suite import Workload
from benchmarks.suite.packages import let_torchvision_import
from benchmarks.variants.recipes import in_autocast

_INSTALL = {
    "pytorch_autotune": "pip install pytorch-autotune",
    "accelerate": "pip install accelerate",
    "lightning": "pip install lightning",
}


def why_not(module: str) -> str:
    """Return why a rival can't be compared here, '' if it can."""
    if importlib.util.find_spec(module) is not None:
        return ""
    return f"{module} is not installed: {_INSTALL[module]}"


def accelerate(workload: Workload) -> Workload:
    """Train under Hugging Face Accelerate, at the model's own precision."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(workload.model, workload.optimizer, workload.loader)
    return workload._replace(model=model, optimizer=optimizer, loader=loader, backward=accelerator.backward)


def fabric(workload: Workload) -> Workload:
    """Train under Lightning Fabric, at the model's own precision."""
    let_torchvision_import()  # Lightning imports it
    from lightning.fabric import Fabric

    trainer: Any = Fabric()
    model, optimizer = trainer.setup(workload.model, workload.optimizer)
    loader = trainer.setup_dataloaders(workload.loader)
    return workload._replace(model=model, optimizer=optimizer, loader=loader, backward=trainer.backward)


def autotune(workload: Workload) -> Workload:
    """Train with what pytorch-autotune finds in its fast budget of two minutes, or has found before.

    It measures throw-away steps on one batch; what it chooses may have less precision (bfloat16, TF32), as by default.
    """
    import pytorch_autotune

    kind, defaults = type(workload.optimizer), workload.optimizer.defaults
    known = {name: defaults[name] for name in inspect.signature(kind).parameters if name in defaults}
    result: Any = pytorch_autotune.autotune(
        workload.model,
        next(iter(workload.loader)),
        loss_fn=workload.loss,
        optimizer=lambda parameters: kind(parameters, **known),
        budget="fast",
        device=str(next(workload.model.parameters()).device),
        verbose=False,
    )
    tuned = in_autocast(workload, result.model, result.autocast)._replace(optimizer=result.optimizer)
    return tuned if result.scaler is None else _scaled(tuned, result.scaler)


class _ScaledOptimizer:
    """An optimizer whose gradients carry the scale of fp16."""

    def __init__(self, optimizer: Any, scaler: Any) -> None:
        self._optimizer, self._scaler = optimizer, scaler
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        self._scaler.step(self._optimizer)
        self._scaler.update()


def _scaled(workload: Workload, scaler: Any) -> Workload:
    def backward(loss: Tensor) -> None:
        scaler.scale(loss).backward()
        scaler.unscale_(workload.optimizer)  # clipping wants plain gradients

    optimizer: Any = _ScaledOptimizer(workload.optimizer, scaler)
    return workload._replace(optimizer=optimizer, backward=backward)
