"""One whole process that trains a model of the suite, and what it tells of itself.

    python -m benchmarks.whole_process ncf reordered --seconds 180 --hold 20

It ends after so many seconds, counted from its start with all imports. Without accel it ends earlier, `--hold` seconds
after its third step, since from then on its steps go on as they are: `Course.steps_in` counts the rest at the rate of
those seconds. `--hold 0` runs every process to its end.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.suite import MODELS, Size, Workload, train_step
from benchmarks.suite.files import from_files
from benchmarks.variants import variant

_ROOT = Path(__file__).resolve().parent.parent
_WARM_STEPS = 3
"""After so many steps a process without a search is as fast as it will be."""
_WINDOW = 20
"""Steps whose mean loss counts as the loss at a time."""


@dataclass
class Course:
    """What a process tells of its run; times are s since it was started."""

    ends_s: list[float]
    """When each step ended."""
    losses: list[float]
    """Of each step."""
    held_s: float = 0.0
    """How long it ran after its third step, 0 if it never did; its rate is that of this time, else of its last half."""
    peak_mb: float = 0.0
    """Largest resident memory, or largest memory allocated on the GPU, MB."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Of accel's report: name, status, setting and gain of each strategy."""
    remembered: str = ""
    """What accel took over from an earlier run."""

    @property
    def kept(self) -> list[str]:
        """Return the strategies that stayed."""
        return [row["name"] for row in self.rows if row["status"] == "kept"]

    def rate(self) -> float:
        """Return the steps in a second."""
        end = self.ends_s[-1]
        window_s = self.held_s or (end - self.ends_s[0]) / 2
        first = min(bisect.bisect_left(self.ends_s, end - window_s), len(self.ends_s) - 2)
        return (len(self.ends_s) - 1 - first) / (end - self.ends_s[first])

    def steps_in(self, seconds: float) -> float:
        """Return the steps of a process of so many seconds: those it took, and the rest at its own rate."""
        end = self.ends_s[-1]
        if end >= seconds:
            return bisect.bisect_right(self.ends_s, seconds)
        return len(self.ends_s) + (seconds - end) * self.rate()

    def loss(self) -> float:
        """Return the loss at the end: the mean over the last steps."""
        return statistics.fmean(self.losses[-_WINDOW:])

    def reached_s(self, loss: float) -> float | None:
        """Return when the loss was as low for the first time; None if it never was."""
        sums = [0.0, *itertools.accumulate(self.losses)]
        for step in range(_WINDOW, len(self.losses) + 1):
            if (sums[step] - sums[step - _WINDOW]) / _WINDOW <= loss:
                return self.ends_s[step - 1]
        return None


class Stop:
    """Tell when a process ends: at its time, or so long after its third step.

    Args:
        seconds: of the process.
        hold_s: how long it goes on after its third step; 0 for always.
    """

    def __init__(self, seconds: float, hold_s: float) -> None:
        self._seconds, self._hold_s = seconds, hold_s
        self._warm_s: float | None = None

    def __call__(self, steps: int, now_s: float) -> bool:
        """Tell, after a step, whether that was the last."""
        if self._warm_s is None and steps >= _WARM_STEPS:
            self._warm_s = now_s
        return steps > 1 and (now_s >= self._seconds or (0 < self._hold_s <= self.held_s(now_s)))

    def held_s(self, now_s: float) -> float:
        """Return how long ago the third step ended, 0 if it hasn't."""
        return 0.0 if self._warm_s is None else now_s - self._warm_s


def train(workload: Workload, stop: Stop, device: torch.device, clock: Callable[[], float]) -> Course:
    """Train until it is time to stop.

    Args:
        workload: prepared.
        stop: tells when.
        device: where the batches go.
        clock: seconds since the process was started.
    """
    ends_s: list[float] = []
    losses: list[Tensor] = []
    while True:
        for x, target in workload.loader:
            losses.append(train_step(workload, x.to(device), target.to(device)))
            if device.type == "cuda" and len(ends_s) % 10 == 0:
                torch.cuda.synchronize()  # else the host would run ahead of the clock
            ends_s.append(clock())
            if stop(len(ends_s), ends_s[-1]):
                return Course(ends_s, torch.stack(losses).tolist(), stop.held_s(ends_s[-1]))


def work(model: str, name: str, size: Size, data: str, seconds: float, hold_s: float, launched: float) -> Course:
    """Be a process: train a model of the suite in one variant."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workload = MODELS[model](size)
    if data == "real":
        workload = from_files(workload)
    workload.model.to(device)
    chosen = variant(name)
    workload = chosen.prepare(workload, model)
    stop = Stop(seconds, 0.0 if chosen.allow else hold_s)  # the search goes on as long as the run does
    course = train(workload, stop, device, lambda: time.time() - launched)
    course.peak_mb = peak_mb(device)
    if chosen.allow:
        import accel

        report = accel.explain(workload.model)
        columns = ("name", "status", "setting", "gain", "gain_low", "gain_high")
        course.rows = [{column: getattr(row, column) for column in columns} for row in report.rows]
        course.remembered = report.remembered
    return course


def peak_mb(device: torch.device) -> float:
    """Return the largest resident memory of this process, or the largest memory allocated on its GPU, MB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6  # Linux counts in KiB


class ProcessFailed(RuntimeError):
    """A training process ended with an error; the message holds the end of what it printed."""


def run(model: str, name: str, arguments: Sequence[str], environ: Mapping[str, str]) -> Course:
    """Train in a process of its own and return its course.

    Args:
        model: of the suite.
        name: of the variant.
        arguments: more options of this module's command.
        environ: more variables.

    Raises:
        ProcessFailed: if it fails.
    """
    command = [sys.executable, "-m", "benchmarks.whole_process", model, name, *arguments]
    done = subprocess.run(
        [*command, f"--launched={time.time()}"],
        cwd=_ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ProcessFailed(f"{model}, {name}, ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return Course(**json.loads(done.stdout.splitlines()[-1]))


@click.command()
@click.argument("model", type=click.Choice(sorted(MODELS)))
@click.argument("name")
@click.option("--size", default="tiny", show_default=True, type=click.Choice(["tiny", "full"]))
@click.option("--data", default="synthetic", show_default=True, type=click.Choice(["synthetic", "real"]))
@click.option("--seconds", default=180.0, show_default=True, help="Of the process.")
@click.option("--hold", default=20.0, show_default=True, help="Seconds after the third step, without accel; 0 for all.")
@click.option("--launched", type=float, help="When it was started, in seconds since the epoch; default now.")
def main(model: str, name: str, size: Size, data: str, seconds: float, hold: float, launched: float | None) -> None:
    """Train MODEL in the variant NAME, and print its course as JSON."""
    course = work(model, name, size, data, seconds, hold, time.time() if launched is None else launched)
    click.echo(json.dumps(dataclasses.asdict(course)))


if __name__ == "__main__":
    main()
