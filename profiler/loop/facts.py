"""Plain facts about a loader, an optimizer and its parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from accel.profiler.evidence import LoaderFacts, OptimizerFacts


@dataclass(frozen=True)
class Trained:
    """What is trained, kept for when the script has let go of it: a report is made after its `main` has returned."""

    optimizer: OptimizerFacts = field(default_factory=OptimizerFacts)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: str = "float32"


def of_training(optimizers: Iterable[Optimizer], earlier: Trained) -> Trained:
    """Describe what optimizers train, or return the earlier description if there are none."""
    living = list(optimizers)
    parameters = [p for optimizer in living for group in optimizer.param_groups for p in group["params"]]
    if not parameters:
        return earlier
    return Trained(of_optimizers(living), torch.device(parameters[0].device), dtype(parameters))


def of_loader(loader: Any) -> LoaderFacts:
    """Describe a loader."""
    # A loader whose workers outlive epochs reports how many it has now, whatever `num_workers` says.
    lasting = getattr(loader, "worker_processes", None)
    workers = getattr(loader, "num_workers", None) if lasting is None else lasting
    if workers is None:
        return LoaderFacts(kind="own iterator")
    return LoaderFacts(
        kind="DataLoader",
        workers=workers,
        persistent=lasting is not None or bool(getattr(loader, "persistent_workers", False)),
        pinned=bool(getattr(loader, "pin_memory", False)),
    )


def of_optimizers(optimizers: Iterable[Optimizer]) -> OptimizerFacts:
    """Describe the optimizer with the most tensors."""
    largest = max(optimizers, key=lambda o: sum(len(g["params"]) for g in o.param_groups), default=None)
    if largest is None:
        return OptimizerFacts()
    groups = largest.param_groups
    parameters = [p for group in groups for p in group["params"]]
    third_party = not type(largest).__module__.startswith("torch.optim")
    # Muon and LBFGS have one path, which foreach=True and fused=True can't change.
    one_path = not any("foreach" in g or "fused" in g for g in groups)
    # Unset means foreach on a GPU and a loop on a CPU.
    default = bool(parameters) and parameters[0].device.type == "cuda"
    batched = all(g.get("fused") or (default if g.get("foreach") is None else g["foreach"]) for g in groups)
    return OptimizerFacts(
        name=type(largest).__name__,
        tensors=len(parameters),
        elements=sum(p.numel() for p in parameters if not is_lazy(p)),
        multi_tensor=third_party or one_path or batched,
        fused=all(bool(g.get("fused")) for g in groups),
    )


def dtype(parameters: Iterable[Tensor]) -> str:
    """Return the dtype of most parameters, e.g. `float32`."""
    counts = Counter(str(p.dtype).removeprefix("torch.") for p in parameters)
    return counts.most_common(1)[0][0] if counts else "float32"
