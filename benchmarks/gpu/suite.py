"""`make gpu`: every GPU test and benchmark in one command, under ten minutes, one JSON file.

    python3 -m benchmarks.gpu [--out benchmarks/results/gpu-<device>-<date>.json] [--limit 570] [--only SECTION ...]

Runs `pytest -m gpu` first, then the sections of benchmarks/gpu/sections.py, each in a process of its own, the most
important ones first. The file is written anew after each: one that fails, or for which the time runs out, is recorded
as that, and the next is run. At the end the figures are held to the targets (benchmarks/gpu/targets.py); if a test
failed they stay in the file, and nothing is claimed of them. The exit status is 0 if all tests passed and every section
ran to its end, whatever the targets.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import click
import torch

from accel.files import write_atomic
from benchmarks.gpu import targets

ROOT = Path(__file__).resolve().parents[2]
_RESULTS = ROOT / "benchmarks" / "results"

BUDGETS_S = {
    "tests": 200,
    "window_attention": 220,
    "assignment": 90,
    "optimizers": 60,
    "graphs": 60,
    "mixed_precision": 60,
    "training": 210,
    "copy_overlap": 60,
    "gradient_kernels": 60,
    "search": 100,
    "to_target": 240,
    "faults": 300,
    "swin_graphs": 420,
}
"""Most seconds of each part, in the order in which they are run; together they are more than there is time for."""
LEAST_S = 15
"""A section for which less is left is not begun."""
_WORKERS = 8
"""Processes of the tests, where pytest-xdist is installed: they mostly wait for compilers."""

Figures = dict[str, Any]


def run(command: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Run a command and all it starts for so long at most; return its exit status, None if it was ended, and output."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        log.seek(0)
        return code, log.read()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process with its workers, which may outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tests(limit_s: float) -> Figures:
    """Run the GPU tests; return whether all passed, and pytest's last lines."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(_WORKERS)]
    code, output = run(command, limit_s)
    lines = output.strip().splitlines()
    print("\n".join(lines[-40:]), flush=True)
    found: Figures = {"green": code == 0, "line": lines[-1] if lines else ""}
    if code is None:
        found["failed"] = f"took longer than {limit_s:.0f} s"
    elif code:
        found["failed"] = f"exit status {code}"
        found["lines"] = [line for line in lines if line.startswith(("FAILED", "ERROR"))][:40]
    return found


def section(name: str, limit_s: float) -> Figures:
    """Run a section; return its figures, with `failed` if it did not run to its end."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.json"
        code, output = run([sys.executable, "-m", "benchmarks.gpu.sections", name, str(file)], limit_s)
        found: Figures = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    print(output[-4000:], flush=True)
    if code is None:
        found["failed"] = f"took longer than {limit_s:.0f} s"
    elif code and "failed" not in found:
        found["failed"] = f"exit status {code}: {' | '.join(output.strip().splitlines()[-3:])[-500:]}"
    return found


def suite(
    parts: dict[str, Callable[[float], Figures]],
    figures: Figures,
    write: Callable[[Figures], None],
    limit_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> bool:
    """Run the parts within so many seconds; return whether all ran to their end.

    Args:
        parts: what to run, by name, the most important first; each takes its own limit.
        figures: where each part's result goes, and in the end the judgement.
        write: called after each part with all figures so far.
        limit_s: seconds for all together.
        clock: tells the seconds.
    """
    began, complete = clock(), True
    for name, part in parts.items():
        left_s = limit_s - (clock() - began)
        if left_s < LEAST_S:
            figures[name] = {"failed": f"not begun: {max(left_s, 0):.0f} of {limit_s:.0f} s were left"}
        else:
            at = clock()
            print(f"== {name}", flush=True)
            figures[name] = _tried(part, min(left_s, BUDGETS_S.get(name, left_s)))
            figures[name]["seconds"] = round(clock() - at, 1)
        complete = complete and "failed" not in figures[name]
        figures["seconds"] = round(clock() - began, 1)
        figures["targets"] = targets.judged(figures)
        write(figures)
    return complete


def _tried(part: Callable[[float], Figures], limit_s: float) -> Figures:
    try:
        return part(limit_s)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def header() -> Figures:
    """Return what was run where."""
    return {
        "command": "make gpu",
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="Default benchmarks/results/gpu-<device>-<date>.json.")
@click.option("--limit", default=570, show_default=True, help="Seconds for everything.")
@click.option("--only", multiple=True, type=click.Choice(list(BUDGETS_S)), help="Leave the other parts out.")
def main(out: Path | None, limit: int, only: tuple[str, ...]) -> None:
    """Run the GPU suite."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was run, nothing was written")
        sys.exit(2)
    figures = header()
    name = f"gpu-{figures['device'].split()[-1].lower()}-{figures['date']}.json"
    target = out or Path(os.environ.get("OUT") or _RESULTS) / name
    parts: dict[str, Callable[[float], Figures]] = {
        name: tests if name == "tests" else lambda limit_s, name=name: section(name, limit_s)  # type: ignore[misc]
        for name in BUDGETS_S
        if not only or name in only
    }
    complete = suite(parts, figures, lambda now: write_atomic(target, json.dumps(now, indent=1) + "\n"), limit)
    for part in parts:
        if "failed" in figures[part]:
            print(f"{part}: {figures[part]['failed']}")
    print(targets.table(figures["targets"]))
    print(f"wrote {target.name} after {figures['seconds']:.0f} s")
    sys.exit(0 if complete else 1)


if __name__ == "__main__":
    main()
