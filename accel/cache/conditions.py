"""The conditions of a run: two runs with the same ones may expect the same of a plan."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import accel
from accel.run import Run
from accel.run.machine import machine_name
from accel.search.plan import fingerprint


def conditions(run: Run, options: dict[str, Any]) -> dict[str, Any]:
    """Return what a plan depends on, as JSON that people can read.

    Args:
        run: after some observed steps: its batches and optimizers are known.
        options: of the call of `optimize`.
    """
    loader = run.loader
    return {
        "model": type(run.model).__name__,
        "parameters": fingerprint(run.model),
        "modules": _digest(_structure(run.model)),
        # Where it is chosen while training, the search begins at this batch in one run and at that one in the next.
        "batch": str(_of_any_size(run.observed.batch) if "max_batch_size" in options else run.observed.batch),
        "inputs": sorted(run.observed.input_dtypes),
        "own_autocast": run.observed.autocast,
        "optimizers": sorted(_kind(optimizer) for optimizer in run.optimizers),
        "loader": _kind(loader),
        "dataset": _kind(getattr(loader, "dataset", None)),
        "loader_workers": str(getattr(loader, "num_workers", None)),
        **options,
        "device": machine_name(run.device),
        "cores": run.cores,
        "threads": run.threads,
        "ranks": run.world_size,
        "ranks_per_host": os.environ.get("LOCAL_WORLD_SIZE", ""),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accel": accel.__version__,
    }


def _of_any_size(shape: Any) -> Any:
    """Return a batch's shape with a star in place of the number of its samples."""
    if isinstance(shape, torch.Size):
        return ("*", *shape[1:]) if shape else ()
    return tuple(map(_of_any_size, shape)) if isinstance(shape, tuple) else shape


def _structure(model: nn.Module) -> Iterable[str]:
    """Yield what the names and shapes of the parameters don't tell: classes, strides and the like, what is trained."""
    for name, module in model.named_modules():
        # Other classes' `extra_repr` may hold addresses, or take long.
        known = type(module).__module__.startswith("torch.nn.")
        yield f"{name} {_kind(module)} {module.extra_repr() if known else ''}"
    for name, parameter in model.named_parameters():
        yield f"{name} {parameter.requires_grad}"


def _kind(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode(errors="replace")).hexdigest()[:16]
