"""One whole process that trains a model of the suite, and what it tells of itself.

    python -m benchmarks.whole_process ncf reordered --seconds 180 --hold 20

It ends after so many seconds, counted from its start with all imports. Without accel it ends earlier, `--hold` seconds
after its third step, since from then on its steps go on as they are: `Course.steps_in` counts the rest at the rate of
those seconds. `--hold 0` runs every process to its end.

With `--lock FILE` a process imports and makes its data at once, and touches the device when it has the lock; its time
is counted from then on (`benchmarks.device_lock`); with accel it is over as soon as the search has ended. After its
time it trains on for `--settled` seconds, whose steps are counted once the device has done them all.
"""

from __future__ import annotations

import bisect
import dataclasses
import gc
import importlib
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from benchmarks.device_lock import device_lock
from benchmarks.losses import Losses
from benchmarks.suite import MODELS, Size, Workload, train_step
from benchmarks.suite.files import from_files
from benchmarks.turn_clock import end_with_parent
from benchmarks.turns import Command, take_turns
from benchmarks.variants import Variant, optimized, variant

_WARM_STEPS = 3
"""After so many steps a process without a search is as fast as it will be."""
TURN_S = 2.0
"""Long against the first step of a turn, which finds cold caches; short against what the neighbours do."""
_LEAST_SEARCH = 20
"""Steps after which a search that has not begun is none."""
_LONG_EPOCH = 64
"""Least steps of an epoch at full size: workers begin it with nothing fetched."""
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
    settled_rate: float = 0.0
    """Steps in a second after all others, 0 if there were none: whatever accel does is in place by then."""
    settled_peak_mb: float = 0.0
    """As `peak_mb`, in that time: without what a search needs."""
    state: str = ""
    """Of accel's report: whether the search had ended before."""
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
        return self.last_rate(1.0 if self.held_s else 0.5)

    def last_rate(self, share: float) -> float:
        """Return the steps in a second over the last part of the time after the third step."""
        end = self.ends_s[-1]
        window_s = share * (self.held_s or end - self.ends_s[0])
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


def _go_on() -> None:
    pass


def train(
    workload: Workload,
    stop: Callable[[int, float], bool],
    device: torch.device,
    clock: Callable[[], float],
    between: Callable[[], None],
) -> Course:
    """Train until it is time to stop.

    Args:
        workload: prepared.
        stop: tells after how many steps and seconds.
        device: where the batches go.
        clock: seconds since the process was started.
        between: called between two steps.
    """
    ends_s: list[float] = []
    losses = Losses(device)
    ahead = workload.non_blocking
    while True:
        for x, target in workload.loader:
            x, target = x.to(device, non_blocking=ahead), target.to(device, non_blocking=ahead)
            losses.add(train_step(workload, x, target))
            if len(ends_s) % 10 == 0:
                _wait_for(device)  # else the host would run ahead of the clock
            ends_s.append(clock())
            if stop(len(ends_s), ends_s[-1]):
                return Course(ends_s, losses.numbers())
            between()


class Job(NamedTuple):
    """What a process does."""

    model: str
    variant: str
    size: Size = "tiny"
    data: str = "synthetic"
    seconds: float = 180.0
    hold_s: float = 20.0
    budget: str = ""
    """Of `accel.optimize`; '' for its default."""
    seed: int = 0
    lock: Path | None = None
    """What is waited for before the device is touched."""
    settled_s: float = 3.0
    """How long it trains on after its time, if there is a lock."""


def work(job: Job, launched: float, between: Callable[[], None] = _go_on) -> Course:
    """Be a process: train a model of the suite in one variant.

    Args:
        job: what to do.
        launched: when the process was started, s since the epoch.
        between: called between two steps.
    """
    torch.manual_seed(job.seed)
    workload = MODELS[job.model](job.size)
    if job.data == "real":
        workload = from_files(workload)
    if job.size == "full":
        workload = _in_long_epochs(workload)
    chosen = variant(job.variant)
    if job.lock is not None:
        end_with_parent()
        _import_early(chosen)
    with device_lock(job.lock):
        course = _train_on_device(job, workload, chosen, time.time() if job.lock else launched, between)
        if job.lock is not None and torch.cuda.is_available():  # or the next one begins beside what this one held
            del workload
            gc.collect()
            torch.cuda.empty_cache()
        return course


def _in_long_epochs(workload: Workload) -> Workload:
    """Return the workload with epochs of real data's length: its samples several times, each time in another order."""
    loader = workload.loader
    sampler = RandomSampler(loader.dataset, num_samples=max(len(loader.dataset), _LONG_EPOCH * loader.batch_size))
    return workload._replace(loader=DataLoader(loader.dataset, loader.batch_size, sampler=sampler))


def _import_early(chosen: Variant) -> None:
    """Import what is imported by the first call otherwise, on the device's time."""
    if chosen.allow:
        importlib.import_module("accel.entry")
    if chosen.caches:
        importlib.import_module("torch._inductor.compile_fx")


def _train_on_device(
    job: Job, workload: Workload, chosen: Variant, began: float, between: Callable[[], None]
) -> Course:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workload.model.to(device)
    if job.budget:
        workload = optimized(workload, allow=chosen.allow, budget=job.budget)
    else:
        workload = chosen.prepare(workload, job.model)
    stop = Stop(job.seconds, 0.0 if chosen.allow else job.hold_s)  # the search goes on as long as the run does

    def is_over(steps: int, now_s: float) -> bool:
        return stop(steps, now_s) or (job.lock is not None and steps > _LEAST_SEARCH and _has_searched(workload.model))

    course = train(workload, is_over, device, lambda: time.time() - began, between)
    course.held_s = stop.held_s(course.ends_s[-1])
    course.peak_mb = peak_mb(device)
    if chosen.allow:
        import accel

        report = accel.explain(workload.model)
        columns = ("name", "status", "setting", "gain", "gain_low", "gain_high", "why")
        course.rows = [{column: getattr(row, column) for column in columns} for row in report.rows]
        course.remembered, course.state = report.remembered, report.state
    if job.lock is not None:
        course.settled_rate, course.settled_peak_mb = _train_on(job, workload, device)
    return course


def _has_searched(model: nn.Module) -> bool:
    """Return whether a search of accel's has ended; False without accel."""
    entry = sys.modules.get("accel.entry")
    optimized_model = None if entry is None else entry.optimized(model)
    return optimized_model is not None and not optimized_model.session.searching


def _train_on(job: Job, workload: Workload, device: torch.device) -> tuple[float, float]:
    """Train for some time more; return the steps in a second, and the largest memory, MB, after the first steps."""
    began = 0.0

    def stop(steps: int, now: float) -> bool:
        nonlocal began
        if steps == _WARM_STEPS:  # the loader has begun anew
            _wait_for(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = time.time()
        return steps > _WARM_STEPS and now >= began + job.settled_s

    course = train(workload, stop, device, time.time, _go_on)
    _wait_for(device)
    return (len(course.ends_s) - _WARM_STEPS) / (time.time() - began), peak_mb(device)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


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
@click.option("--budget", default="", help="Of accel.optimize.  [default: its own]")
@click.option("--seed", default=0, show_default=True, help="Of the weights and the order of the data.")
@click.option("--lock", type=click.Path(path_type=Path), help="Wait for this file's lock before the device is touched.")
@click.option("--settled", default=3.0, show_default=True, help="Seconds to train on after that, with --lock.")
@click.option("--launched", type=float, help="When it was started, in seconds since the epoch; default now.")
@click.pass_obj
def main(between: Callable[[], None] | None, /, launched: float | None, **options: Any) -> None:
    """Train MODEL in the variant NAME, and print its course as JSON."""
    launched = time.time() if launched is None else launched
    job = Job(variant=options.pop("name"), hold_s=options.pop("hold"), settled_s=options.pop("settled"), **options)
    click.echo(json.dumps(dataclasses.asdict(work(job, launched, between or _go_on))))


if __name__ == "__main__":
    main()
