"""What measuring the noise scale, and the batch controller, add to a step of one replica: with and without, in turns.

    python -m benchmarks.noise_overhead [--part noise] [--rounds 60] [--record]

| part | the loop with it | the loop without |
|---|---|---|
| `noise` | a `NoiseMeter` that gets all events | batches from a list |
| `goodput` | the same, and a `BatchPolicy` that gets step times and decides: all that is measured | the same |
| `controller` | `accel.optimize(…, elastic=…)` at the loop's own batch: all it does | a `DataLoader` |

Two loops train alike models in one process, in pieces of 0.4 s, A B B A … Of a piece the mean step counts, not the
median: most steps are not measured, and those that are must weigh in it. The ratio is that of neighbouring pieces, with
its 95 % interval; beside it how often a step was measured, and what one measurement took of the meter's own time. What
comes once in a run is left out: the first measurement, which looks for the way to replay a part, and those of the first
steps, which come sooner.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import accel
from accel import strategies
from accel.elastic.batch_size.choice import interval_of
from accel.elastic.batch_size.policy import BatchPolicy
from accel.goodput.noise_meter import NoiseMeter
from accel.goodput.observations import WINDOW
from accel.profiler.loop import backward
from accel.profiler.trial import interval, winsorised
from benchmarks.record import Column, Record
from benchmarks.render import SOURCE, Row

PIECE_S = 0.4
WARM_UP_S = 3.0
SETTLED_S = 10.0
"""Until the controller's first measurements, which come sooner, have been paid for."""
EPOCH = 1000
"""Batches."""


def _or_none(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


RECORD = Record(
    "noise-overhead",
    "what measuring the gradient noise scale, and the batch controller, add to a step",
    {
        "model": Column("model, batch and optimizer", "model"),
        "part": Column("what was added: noise, all measurements and decisions, or the whole controller", "with"),
        "step_ms": Column("a step without, median of the pieces' means", "step ms", ":.2f"),
        "added": Column(
            "of a step, by the ratio of neighbouring pieces", "added [95 %]", "{added:+.1%} [{low:+.1%}, {high:+.1%}]"
        ),
        "low": Column("lower end of the interval"),
        "high": Column("upper end"),
        "every": Column(
            "steps for one that was measured; of the meter alone", "one step in", lambda row: _or_none(row["every"], 0)
        ),
        "measuring_ms": Column(
            "the meter's own time in a measured step, median; of the meter alone",
            "measuring ms",
            lambda row: _or_none(row["measuring_ms"], 2),
        ),
        "rounds": Column("pairs of pieces", "pairs"),
    },
    key=("model", "part"),
    head=f"{SOURCE}. Mean steps of pieces of {PIECE_S} s, with and without in turns, in one process.",
)


def small() -> nn.Module:
    """Return the small multilayer perceptron."""
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers)


def wide() -> nn.Module:
    """Return four layers of 512."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 10))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, 1e-3, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(parameters, 1e-4)


CASES: dict[str, tuple[Callable[[], nn.Module], int, int, Callable[[Any], torch.optim.Optimizer]]] = {
    "small MLP, 128, SGD": (small, 64, 128, sgd),
    "small MLP, 128, AdamW": (small, 64, 128, adamw),
    "4x512 MLP, 128, SGD": (wide, 512, 128, sgd),
    "4x512 MLP, 128, AdamW": (wide, 512, 128, adamw),
}
"""Name → model, inputs, batch, optimizer."""


class Loop(ABC):
    """A training loop.

    Args:
        case: one of `CASES`.
    """

    def __init__(self, case: str) -> None:
        make, self._features, self._batch, optimizer = CASES[case]
        torch.manual_seed(0)
        self._model = make()
        self._optimizer = optimizer(self._model.parameters())
        self._running = self._train()
        self.steps = 0
        self.measuring_s: list[float] = []
        """The meter's own time in each measured step."""

    @abstractmethod
    def _batches(self) -> Any:
        """Return the batches of an epoch, to be gone through again and again."""

    def _train(self) -> Iterator[None]:
        """Train step by step."""
        batches = self._batches()
        while True:
            for x, y in batches:
                self._backward(self._model(x), y)
                self._optimizer.step()
                yield

    def piece(self, seconds: float) -> float:
        """Train for so long, and return the mean step, s."""
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            for _ in range(4):
                next(self._running)
            steps += 4
        self.steps += steps
        return (time.perf_counter() - began) / steps

    def close(self) -> None:
        """Train no more."""
        self._running = iter(())

    def count_anew(self) -> None:
        """Forget the steps so far, which have warmed all up."""
        self.steps, self.measuring_s = 0, []

    def _backward(self, output: Tensor, y: Tensor) -> None:
        self._optimizer.zero_grad()
        nn.functional.cross_entropy(output, y).backward()  # type: ignore[no-untyped-call]


class Listed(Loop):
    """Batches from a list."""

    def _batches(self) -> Any:
        return [(torch.randn(self._batch, self._features), torch.randint(0, 10, (self._batch,))) for _ in range(16)]


class Metered(Listed):
    """The same with a noise meter."""

    def _train(self) -> Iterator[None]:
        batches, meter = self._batches(), NoiseMeter(self._model, [self._optimizer])
        while True:
            for x, y in batches:
                meter.begin_step()
                meter.begin_batch(len(x))
                self._backward(meter.call(self._model, (x,), {}) if meter.wants_call else self._model(x), y)
                meter.before_update(self._optimizer)
                self._optimizer.step()
                count = meter.noise.measured
                meter.end_step()
                if meter.noise.measured > count:
                    self.measuring_s.append(meter.last_cost_s)
                if meter.refusal:
                    raise RuntimeError(f"nothing was measured: {meter.refusal}")
                self._step_ended(meter)
                yield

    def _step_ended(self, meter: NoiseMeter) -> None:
        """Do nothing more."""


class Judged(Metered):
    """The same, with step times and decisions as `BatchRun` has them taken; the batch can't be changed."""

    def __init__(self, case: str) -> None:
        super().__init__(case)
        self._controller = BatchPolicy(self._batch, self._batch)
        self._ended = self._due = 0
        self._ended_s = time.perf_counter()

    def _step_ended(self, meter: NoiseMeter) -> None:
        began_s, self._ended_s = self._ended_s, time.perf_counter()
        self._ended += 1
        if self._due - self._ended < 2 * WINDOW:
            self._controller.timed(self._batch, self._ended_s - began_s)
        if self._ended >= self._due:
            decision = self._controller.decide(self._ended, interval_of(meter.noise.estimate()))
            self._due = self._ended + decision.steps


class Rows(Dataset[Any]):
    """Samples that are fetched a batch at a time, so that fetching takes no longer than it must.

    Args:
        count: of samples.
        features: of each.
    """

    def __init__(self, count: int, features: int) -> None:
        self._x, self._y = torch.randn(count, features), torch.randint(0, 10, (count,))

    def __len__(self) -> int:
        return len(self._x)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self._x[indices], self._y[indices]


class Loaded(Loop):
    """Batches from a loader."""

    def _batches(self) -> Any:
        rows = Rows(EPOCH * self._batch, self._features)
        return DataLoader(rows, self._batch, shuffle=True, collate_fn=_as_it_is)


class Controlled(Loaded):
    """The same with the batch controller, and no strategies; the batch can't be changed."""

    def _batches(self) -> Any:
        _, loader, _ = accel.optimize(
            self._model,
            super()._batches(),
            self._optimizer,
            elastic=accel.Elastic(max_batch_size=self._batch),
            disable=strategies.names(),
            cache=False,
        )
        return loader

    def close(self) -> None:
        """End the controller, too, which follows each backward pass of the process."""
        super().close()
        accel.undo(self._model)


def _as_it_is(batch: Any) -> Any:
    return batch


def _piece(loop: Loop, *, alone: bool) -> float:
    """Train for a piece; the loop without anything is not to be heard by what follows the other one."""
    with backward.unheard() if alone else contextlib.nullcontext():
        return loop.piece(PIECE_S)


PARTS: dict[str, tuple[type[Loop], type[Loop], float]] = {
    "noise": (Listed, Metered, WARM_UP_S),
    "goodput": (Listed, Judged, WARM_UP_S),
    "controller": (Loaded, Controlled, SETTLED_S),
}
"""Part → the loop without it, that with it, and what that takes to warm up, s."""


def measure(case: str, part: str, rounds: int) -> Row:
    """Time a case with and without a part."""
    kind, kind_with, warm_up_s = PARTS[part]
    bare, laden = kind(case), kind_with(case)
    bare.piece(WARM_UP_S / 3)
    laden.piece(warm_up_s)
    laden.count_anew()
    without: list[float] = []
    logs: list[float] = []
    for turn in range(rounds):
        order = (bare, laden) if turn % 2 == 0 else (laden, bare)
        took = {loop: _piece(loop, alone=loop is bare) for loop in order}
        without.append(took[bare])
        logs.append(math.log(took[laden] / took[bare]))
    laden.close()
    logs = winsorised(logs)
    low, high = interval(logs, 0.025)
    measured = laden.measuring_s
    return {
        "model": case,
        "part": part,
        "step_ms": 1e3 * statistics.median(without),
        "added": math.expm1(statistics.fmean(logs)),
        "low": math.expm1(low),
        "high": math.expm1(high),
        "every": laden.steps / len(measured) if measured else None,
        "measuring_ms": 1e3 * statistics.median(measured) if measured else None,
        "rounds": rounds,
    }


@click.command()
@click.option("--part", "parts", multiple=True, type=click.Choice(list(PARTS)), help="Only these.")
@click.option("--rounds", default=60, show_default=True, help="Pairs of pieces for each model.")
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(parts: tuple[str, ...], rounds: int, record: bool) -> None:
    """Measure."""
    torch.set_num_threads(1)
    for part in parts or PARTS:
        for case in CASES:
            row = measure(case, part, rounds)
            added = "{added:+.1%} [{low:+.1%}, {high:+.1%}]".format_map(row)
            print(f"{part:10} {case:24} {row['step_ms']:6.2f} ms, added {added}", flush=True)
            if record:
                RECORD.write([row])


if __name__ == "__main__":
    main()
