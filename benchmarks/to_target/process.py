"""One process that trains a job in one variant until its target, and prints what came of it as JSON.

    python -m benchmarks.to_target.process images x8 --seed 0

| variant | batch | learning rate |
|---|---|---|
| `x1` | as the job has it | as the job has it |
| `x4` | four times that, throughout | by the rule that accel takes for the optimizer, at the job's noise scale |
| `accel` | `accel.optimize(…, elastic=…)`, all strategies disabled | as accel does |
| `accel and strategies` | the same, and strategies are searched for by default | as accel does |

All variants of a seed have the same weights at first and the same order of samples, that in which accel deals them: in
another order a fixed batch of 32 takes 8 % more or fewer samples to the target of `text` (standard deviation, 6 seeds).

The clock runs from the loader's first batch to the evaluation that reaches the target, with all that accel does, and
stands still while what is held out is evaluated. `cpu_s` is this process's processor time over the same.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler

from accel import strategies
from accel.dataio.sampling.permutation import Permutation
from accel.elastic.learning_rate import scaled_values
from accel.elastic.scaling_rules import BatchScale, rule_for
from accel.profiler.host import usable_cores
from benchmarks.to_target.jobs import JOBS, SHORT, Job, Source, loss

ACCEL: dict[str, dict[str, Any]] = {
    "accel": {"disable": strategies.names()},
    "accel and strategies": {},
}
"""Arguments of `accel.optimize` by variant, besides the largest batch."""
MOST_TIMES = 32
"""Largest batch, in starting batches: of the sweep, and of accel."""
SMOOTHED = 3
"""Evaluations whose mean must reach the target: a single one may by luck."""


class Evaluation(NamedTuple):
    """What is held out, judged once."""

    samples: int
    """Trained on."""
    seconds: float
    cpu_s: float
    score: float


@dataclass
class Outcome:
    """How a run went."""

    job: str
    variant: str
    seed: int
    target: float
    threads: int = 1
    reached: bool = False
    seconds: float = 0.0
    """To the target, or to where the run ended without it."""
    cpu_s: float = 0.0
    samples: int = 0
    steps: int = 0
    batch: int = 0
    """Samples of the last whole step."""
    score: float = math.nan
    data: str = ""
    batches: list[dict[str, Any]] = field(default_factory=list)
    """accel's changes of the batch."""
    notes: list[str] = field(default_factory=list)
    """What accel said of a batch that it can't change."""
    evaluations: list[Evaluation] = field(default_factory=list)


class AccelsOrder(Sampler[int]):
    """The order of samples in which accel deals a shuffled loader's, by their number and the seed of torch."""

    def __init__(self, length: int, seed: int) -> None:
        self._length, self._seed = length, seed
        self._epoch = 0
        self._first = self._numbers()  # before the clock runs

    def _numbers(self) -> list[int]:
        numbers: list[int] = Permutation(self._length, seed=self._seed, epoch=self._epoch)(
            np.arange(self._length)
        ).tolist()
        return numbers

    def __iter__(self) -> Iterator[int]:
        numbers = self._numbers() if self._epoch else self._first
        self._epoch += 1
        return iter(numbers)

    def __len__(self) -> int:
        return self._length


class Stopwatch:
    """Counts wall and processor time, but for what is paused.

    Args:
        wall, cpu: return s.
    """

    def __init__(
        self, wall: Callable[[], float] = time.perf_counter, cpu: Callable[[], float] = time.process_time
    ) -> None:
        self._clocks = wall, cpu
        self._away = [0.0, 0.0]
        self._began = self._now()

    def _now(self) -> tuple[float, float]:
        wall, cpu = self._clocks
        return wall(), cpu()

    def read(self) -> tuple[float, float]:
        """Return wall and processor time so far."""
        now = self._now()
        wall_s, cpu_s = (at - began - away for at, began, away in zip(now, self._began, self._away, strict=True))
        return wall_s, cpu_s

    def without(self, work: Callable[[], float]) -> float:
        """Do some work that does not count, and return its result."""
        before = self._now()
        result = work()
        self._away = [away + at - began for away, at, began in zip(self._away, self._now(), before, strict=True)]
        return result


def scale_by_hand(optimizer: Optimizer, job: Job, batch: int) -> None:
    """Set the learning rate of a fixed batch, by the rule and with the values that accel's steps have."""
    by = rule_for(optimizer).multipliers(BatchScale(batch, job.batch, noise=job.noise))
    for group in optimizer.param_groups:
        group.update(scaled_values(optimizer, group, by))


def train(
    job: Job,
    source: Source,
    outcome: Outcome,
    between: Callable[[], None] = lambda: None,
    device: str = "cpu",
    **clocks: Any,
) -> Outcome:
    """Train until the target, or the most samples, or a loss that is not finite.

    Args:
        job: with its target.
        source: its data.
        outcome: names job, variant and seed; returned with the rest.
        between: called between two steps.
        device: that trains.
        clocks: of the `Stopwatch`.
    """
    torch.manual_seed(outcome.seed)
    model = job.model(source).to(device)
    source = source._replace(held_out=[(x.to(device), y.to(device)) for x, y in source.held_out])
    optimizer = job.optimizer(model)
    loader, close = _prepared(job, source, outcome, model, optimizer)
    due = job.every
    watch = Stopwatch(**clocks)
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            step_loss = loss(model, x.to(device), y.to(device))
            step_loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            outcome.steps += 1
            outcome.samples += len(y)
            if outcome.samples >= due:
                due += job.every * math.ceil((outcome.samples - due + 1) / job.every)
                if _judged(job, source, model, outcome, watch, len(y)):
                    close()
                    return outcome
            between()


def _prepared(
    job: Job, source: Source, outcome: Outcome, model: nn.Module, optimizer: Optimizer
) -> tuple[Any, Callable[[], None]]:
    """Return the loader of a variant, and what ends it."""
    arguments = ACCEL.get(outcome.variant)
    times = 1 if arguments is not None else int(outcome.variant.removeprefix("x"))
    batch = job.batch * times
    if arguments is None:
        scale_by_hand(optimizer, job, batch)
        order = AccelsOrder(len(source.train), outcome.seed)  # type: ignore[arg-type]
        return DataLoader(source.train, batch, sampler=order, drop_last=True), lambda: None
    import accel

    loader: Any = DataLoader(source.train, batch, shuffle=True, drop_last=True)
    model, loader, optimizer = accel.optimize(
        model, loader, optimizer, elastic=accel.Elastic(max_batch_size=job.batch * MOST_TIMES), cache=False, **arguments
    )

    def close() -> None:
        report = accel.explain(model)
        outcome.batches = [dataclasses.asdict(row) for row in report.batch_rows]
        outcome.notes = [note for note in (report.batch_note,) if note]
        accel.undo(model)

    return loader, close


def _judged(job: Job, source: Source, model: nn.Module, outcome: Outcome, watch: Stopwatch, batch: int) -> bool:
    """Evaluate, and return whether the run ends here."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # the steps so far are to be in the time
    outcome.seconds, outcome.cpu_s = watch.read()
    outcome.batch = batch
    score = watch.without(lambda: evaluate(job, source, model))
    outcome.evaluations.append(Evaluation(outcome.samples, outcome.seconds, outcome.cpu_s, score))
    recent = [each.score for each in outcome.evaluations[-SMOOTHED:]]
    outcome.score = math.fsum(recent) / len(recent)
    outcome.reached = len(recent) == SMOOTHED and job.reached(outcome.score)
    return outcome.reached or outcome.samples >= job.most or not math.isfinite(score)


def evaluate(job: Job, source: Source, model: nn.Module) -> float:
    """Return the score of what is held out."""
    model.eval()
    with torch.no_grad():
        score = job.score(model, source)
    model.train()
    return score


@click.command()
@click.argument("name", type=click.Choice(list(JOBS)))
@click.argument("variant")
@click.option("--seed", default=0, show_default=True)
@click.option("--threads", default=usable_cores(), show_default="one per core", help="Of torch.")
@click.option("--device", default="cpu", show_default=True, help="That trains.")
@click.option("--target", type=float, help="Another one than the job's.")
@click.option("--short", is_flag=True, help="A target that is reached in a few seconds.")
@click.option("--folder", help="Where the data is; default looks for it.")
@click.option("--launched", hidden=True)
@click.pass_obj
def main(
    between: Callable[[], None] | None,
    name: str,
    variant: str,
    seed: int,
    threads: int,
    device: str,
    target: float | None,
    short: bool,
    folder: str | None,
    launched: str | None,
) -> None:
    """Train the job NAME in a VARIANT, and print its outcome as JSON."""
    torch.set_num_threads(threads)
    job = JOBS[name]
    target = SHORT[name] if short and target is None else target
    job = job if target is None else dataclasses.replace(job, target=target)
    source = job.load(folder)
    outcome = Outcome(name, variant, seed, job.target, threads, data=source.name)
    train(job, source, outcome, between or _go_on, device)
    click.echo(json.dumps(dataclasses.asdict(outcome)))


def _go_on() -> None:
    pass


if __name__ == "__main__":
    main()
