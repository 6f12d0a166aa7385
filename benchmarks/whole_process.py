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
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import click
import torch

from benchmarks.losses import Losses
from benchmarks.suite import MODELS, Size, Workload, train_step
from benchmarks.suite.files import from_files
from benchmarks.turns import Command, take_turns
from benchmarks.variants import variant

_WARM_STEPS = 3
"""After so many steps a process without a search is as fast as it will be."""
TURN_S = 2.0
"""Long against the first step of a turn, which finds cold caches; short against what the neighbours do."""
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
    """Of accel's report: name, status, setting, gain and reason of each strategy."""
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

    def steps_until(self, second: float) -> float:
        """Return the steps until then, the share of one that was under way included."""
        number = bisect.bisect_right(self.ends_s, second)
        if number in (0, len(self.ends_s)):
            return number
        before, after = self.ends_s[number - 1 : number + 1]
        return number + (second - before) / (after - before)

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


def train(
    workload: Workload, stop: Stop, device: torch.device, clock: Callable[[], float], between: Callable[[], None]
) -> Course:
    """Train until it is time to stop.

    Args:
        workload: prepared.
        stop: tells when.
        device: where the batches go.
        clock: seconds since the process was started.
        between: called between two steps.
    """
    ends_s: list[float] = []
    losses = Losses(device)
    while True:
        for x, target in workload.loader:
            losses.add(train_step(workload, x.to(device), target.to(device)))
            if device.type == "cuda" and len(ends_s) % 10 == 0:
                torch.cuda.synchronize()  # else the host would run ahead of the clock
            ends_s.append(clock())
            if stop(len(ends_s), ends_s[-1]):
                return Course(ends_s, losses.numbers(), stop.held_s(ends_s[-1]))
            between()


def work(
    model: str,
    name: str,
    size: Size,
    data: str,
    seconds: float,
    hold_s: float,
    launched: float,
    between: Callable[[], None],
) -> Course:
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
    course = train(workload, stop, device, lambda: time.time() - launched, between)
    course.peak_mb = peak_mb(device)
    if chosen.allow:
        import accel

        report = accel.explain(workload.model)
        columns = ("name", "status", "setting", "gain", "gain_low", "gain_high", "why")
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


class Process(NamedTuple):
    """A process to be run."""

    model: str
    """Of the suite."""
    variant: str
    arguments: Sequence[str]
    """More options of this module's command."""
    environ: Mapping[str, str]
    """More variables."""


def run(processes: Sequence[Process]) -> list[Course | ProcessFailed]:
    """Train in processes that take turns; return the course of each, or why it failed."""
    start = ["-m", "benchmarks.turn_clock", str(TURN_S), "whole_process"]
    commands = [Command([*start, each.model, each.variant, *each.arguments], each.environ) for each in processes]
    return [_course(process, done) for process, done in zip(processes, take_turns(commands), strict=True)]


def _course(process: Process, done: subprocess.CompletedProcess[str]) -> Course | ProcessFailed:
    if done.returncode:
        ended = f"{process.model}, {process.variant}, ended with {done.returncode}"
        return ProcessFailed(f"{ended}:\n{done.stderr[-3000:]}")
    return Course(**json.loads(done.stdout.splitlines()[-1]))


@click.command()
@click.argument("model", type=click.Choice(sorted(MODELS)))
@click.argument("name")
@click.option("--size", default="tiny", show_default=True, type=click.Choice(["tiny", "full"]))
@click.option("--data", default="synthetic", show_default=True, type=click.Choice(["synthetic", "real"]))
@click.option("--seconds", default=180.0, show_default=True, help="Of the process.")
@click.option("--hold", default=20.0, show_default=True, help="Seconds after the third step, without accel; 0 for all.")
@click.option("--launched", type=float, help="When it was started, in seconds since the epoch; default now.")
@click.pass_obj
def main(
    between: Callable[[], None] | None,
    model: str,
    name: str,
    size: Size,
    data: str,
    seconds: float,
    hold: float,
    launched: float | None,
) -> None:
    """Train MODEL in the variant NAME, and print its course as JSON."""
    launched = time.time() if launched is None else launched
    course = work(model, name, size, data, seconds, hold, launched, between or _go_on)
    click.echo(json.dumps(dataclasses.asdict(course)))


def _go_on() -> None:
    pass


if __name__ == "__main__":
    main()
