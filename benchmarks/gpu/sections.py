"""The sections of the GPU suite, and one of them in a process of its own.

    python3 -m benchmarks.gpu.sections NAME FILE    # `make gpu` does so, with a time limit

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
from typing import Any, NamedTuple

from accel.files import write_atomic
from benchmarks.gpu.rows import Figures

LIBRARY = ("accel", "comm", "dataio", "kernels", "profiler")


def _of(module: str, function: str = "everything") -> Figures:
    """Run a benchmark of a module."""
    yield from getattr(importlib.import_module(f"benchmarks.{module}"), function)()


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


class Section(NamedTuple):
    """A part of the suite."""

    run: Callable[[], Figures]
    limit_s: float
    sources: tuple[str, ...]
    """What its figures depend on, beside its own module."""


def _section(module: str, limit_s: float, *sources: str, function: str = "everything") -> Section:
    own = f"benchmarks/{module.replace('.', '/')}.py"
    return Section(partial(_of, module, function), limit_s, (own, *sources))


SECTIONS = {
    "ceilings": _section("gpu.ceilings", 25),
    "overhead": _section("gpu.overhead", 25, *LIBRARY),
    "swin_graphs": _section("gpu.swin_graphs", 50, "accel/graphs", "kernels/window_attention"),
    "graphs": _section("gpu.graphs", 25, "accel/graphs"),
    "gradient_kernels": _section("gradient_kernels", 20, "kernels", "benchmarks/kernels/code_rivals.py"),
    "simota_warps": _section("gpu.simota", 12, "kernels/simota", function="by_warps"),
    "window_attention": _section("window_attention", 220, "kernels/window_attention"),
    "assignment": _section("assignment", 90, "kernels/simota", "kernels/fcos_targets", "benchmarks/gpu/simota.py"),
    "optimizers": _section("gpu.optimizers", 60, "kernels/optimizers", "accel/optim"),
    "mixed_precision": _section("gpu.mixed_precision", 60, "kernels/optimizers", "accel/optim", "accel/amp"),
    "training": _section("swin_training", 210, "kernels/window_attention"),
    "copy_overlap": _section("copy_overlap", 60, "dataio"),
    "to_target": Section(to_target, 240, ("accel/elastic", "accel/goodput", "benchmarks/to_target")),
    "faults": Section(faults, 300, ("profiler", "benchmarks/faults")),
}
"""In the order in which they are worth the time; together they take more than there is."""


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
    sys.exit(0 if written(SECTIONS[sys.argv[1]].run, Path(sys.argv[2])) else 1)
