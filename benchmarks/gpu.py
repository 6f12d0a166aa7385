"""`make gpu`: every GPU test and benchmark in one command, under ten minutes, one JSON file.

    python3 -m benchmarks.gpu [--out benchmarks/results/gpu-<device>-<date>.json]

Runs `pytest -m gpu` first; figures are taken only if that is green. Then one convolutional network is trained under
`accel.optimize(…, allow="reduced")` and the figure of each CUDA strategy is read from its report, the kernels are timed
against their rivals, and the profiler is asked about scripts with one fault each that only a GPU shows.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel.files import write_atomic
from benchmarks import assignment, copy_overlap, gradient_kernels, window_attention
from benchmarks.fault_rows import summarise
from benchmarks.fault_runs import Plan
from benchmarks.faults.table import CUDA_CASES

_RESULTS = Path(__file__).parent / "results"


def tests_pass() -> tuple[bool, str]:
    """Run the GPU tests in a process of their own; return whether they passed and pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines()
    print("\n".join(lines[-30:]), flush=True)
    return done.returncode == 0, lines[-1] if lines else ""


def network(width: int = 64, blocks: int = 8) -> nn.Module:
    """A plain convolutional network of ResNet-like widths for 3 x 64 x 64 images."""
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
    model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="reduced", budget=budget_s)
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


@click.command()
@click.option("--out", default=None, help="Result file; default benchmarks/results/gpu-<device>-<date>.json.")
def main(out: str | None) -> None:
    """Run the GPU suite."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was run, nothing was written")
        sys.exit(2)
    began = time.perf_counter()
    green, line = tests_pass()
    device = torch.cuda.get_device_name()
    summary: dict[str, Any] = {
        "command": "make gpu",
        "date": date.today().isoformat(),
        "device": device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "tests": {"green": green, "line": line},
    }
    if green:
        summary["search"] = {f"batch {n}": searched(n, 1500, 60) for n in (64, 256)}
        summary["window_attention"] = window_attention.everything()
        bytes_per_s = summary["window_attention"]["gb_per_s"] * 1e9
        summary["assignment"] = {"fcos": assignment.fcos_rows(), "simota": assignment.simota_rows(bytes_per_s)}
        summary["gradient_kernels"] = gradient_kernels.everything(bytes_per_s)
        summary["copy_overlap"] = copy_overlap.overlap()
        rows = [Plan(steps=400).examine(case) for case in CUDA_CASES.values()]
        summary["faults"] = {"summary": summarise(rows), "cases": [asdict(row) for row in rows]}
    summary["seconds"] = time.perf_counter() - began
    name = f"gpu-{device.split()[-1].lower()}-{summary['date']}.json"
    target = Path(out) if out else Path(os.environ.get("OUT") or _RESULTS) / name
    write_atomic(target, json.dumps(summary, indent=1) + "\n")
    print(f"wrote {target.name} after {summary['seconds']:.0f} s")
    sys.exit(0 if green else 1)


if __name__ == "__main__":
    main()
