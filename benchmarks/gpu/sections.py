"""The sections of the GPU suite, and one of them in a process of its own.

    python3 -m benchmarks.gpu.sections NAME FILE

A section yields its figures as it finds them, and FILE holds all so far. So one that hangs, or that leaves the device
in an error, costs what it had not found yet and nothing else.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel.files import write_atomic
from benchmarks.gpu.rows import Figures


def _of(module: str) -> Figures:
    """Run a benchmark that has a command of its own."""
    yield from importlib.import_module(f"benchmarks.{module}").everything()


def search() -> Figures:
    """Train one network under `accel.optimize`; each strategy's figure stands in the report."""
    for batch_size in (64, 256):
        yield f"batch {batch_size}", searched(batch_size, 1500, 30)


def faults() -> Figures:
    """Ask the profiler about scripts with one fault each that only a GPU shows."""
    from benchmarks.faults.rows import summarise
    from benchmarks.faults.runs import Plan
    from benchmarks.faults.table import CUDA_CASES

    rows = []
    for case in CUDA_CASES.values():
        rows.append(Plan(steps=400).examine(case))
        yield "cases", [asdict(row) for row in rows]
        yield "summary", summarise(rows)


def to_target() -> Figures:
    """Train two real jobs to a target score: by the user's batch, by larger ones, and by one that accel chooses."""
    from benchmarks.time_to_accuracy import compare, race
    from benchmarks.to_target.jobs import JOBS

    rows = []
    for job in JOBS:
        rows += race(job, ["x1", "x8", "x32", "accel"], 0, 1, ["--device=cuda"])
        yield "rows", rows
        yield "comparison", [row._asdict() for row in compare(rows)]


SECTIONS: dict[str, Callable[[], Figures]] = {
    "window_attention": partial(_of, "window_attention"),
    "assignment": partial(_of, "assignment"),
    "optimizers": partial(_of, "optimizers"),
    "graphs": partial(_of, "gpu.graphs"),
    "mixed_precision": partial(_of, "gpu.mixed_precision"),
    "training": partial(_of, "swin_training"),
    "copy_overlap": partial(_of, "copy_overlap"),
    "gradient_kernels": partial(_of, "gradient_kernels"),
    "search": search,
    "to_target": to_target,
    "faults": faults,
    "swin_graphs": partial(_of, "gpu.swin_graphs"),
}
"""In the order in which they are worth the time."""


def network(width: int = 64, blocks: int = 8) -> nn.Module:
    """Return a plain convolutional network of ResNet-like widths for 3 x 64 x 64 images."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(blocks):
        layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def searched(batch_size: int, steps: int, budget_s: float) -> dict[str, Any]:
    """Train under a search until it ends or `steps` are done, and return the report."""
    import accel

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(2048, 3, 64, 64), torch.randint(0, 10, (2048,)))
    loader = DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=True)
    model = network().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="reduced", budget=budget_s, cache=False)
    done = 0
    while done < steps and accel.explain(model).state == "searching":
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images.cuda()), labels.cuda())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            done += 1
    report: dict[str, Any] = json.loads(accel.explain(model).to_json())
    accel.undo(model)
    return report


def written(section: Callable[[], Figures], file: Path) -> bool:
    """Run a section, its figures so far always in a file, and return whether it ran to its end."""
    found: dict[str, Any] = {}
    try:
        for name, value in section():
            found[name] = value
            write_atomic(file, json.dumps(found))
    except Exception as error:
        traceback.print_exc()
        found["failed"] = f"{type(error).__name__}: {str(error)[:500]}"
        write_atomic(file, json.dumps(found))
        return False
    return True


if __name__ == "__main__":
    sys.exit(0 if written(SECTIONS[sys.argv[1]], Path(sys.argv[2])) else 1)
