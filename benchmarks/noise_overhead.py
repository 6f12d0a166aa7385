"""What measuring the gradient noise scale adds to a step, on one replica: loops with and without, in turns.

    python -m benchmarks.noise_overhead [--rounds 60] [--record]

Two loops train alike models in one process, one with a `NoiseMeter` that gets all events, in pieces of 0.4 s, A B B A …
Of a piece the mean step counts, not the median: most steps are not measured, and those that are must weigh in it. The
ratio is that of neighbouring pieces, with its 95 % interval; beside it how often a step was measured, and what one
measurement took of the meter's own time. The first measurement, which looks for the way to replay a part, comes before.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
import torch
from torch import nn

from accel.goodput.noise_meter import NoiseMeter
from accel.profiler.trial import interval, winsorised
from benchmarks.record import Column, Record
from benchmarks.render import SOURCE, Row

PIECE_S = 0.4
WARM_UP_S = 3.0

RECORD = Record(
    "noise-overhead",
    "what measuring the gradient noise scale adds to a step",
    {
        "model": Column("model, batch and optimizer", "model"),
        "step_ms": Column("a step without, median of the pieces' means", "step ms", ":.2f"),
        "added": Column(
            "of a step, by the ratio of neighbouring pieces", "added [95 %]", "{added:+.1%} [{low:+.1%}, {high:+.1%}]"
        ),
        "low": Column("lower end of the interval"),
        "high": Column("upper end"),
        "every": Column("steps for one that was measured", "one step in", ":.0f"),
        "measuring_ms": Column("the meter's own time in a measured step, median", "measuring ms", ":.2f"),
        "rounds": Column("pairs of pieces", "pairs"),
    },
    key=("model",),
    head=f"{SOURCE}. Mean steps of pieces of {PIECE_S} s, with and without a meter in turns, in one process.",
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


class Loop:
    """A training loop, with a meter or without.

    Args:
        case: one of `CASES`.
        metered: whether it has one.
    """

    def __init__(self, case: str, metered: bool) -> None:
        make, features, batch, optimizer = CASES[case]
        torch.manual_seed(0)
        self._model = make()
        self._optimizer = optimizer(self._model.parameters())
        self._batches = [(torch.randn(batch, features), torch.randint(0, 10, (batch,))) for _ in range(16)]
        self.meter = NoiseMeter(self._model, [self._optimizer]) if metered else None
        self.measuring_s: list[float] = []
        self.steps = 0
        self._steps = self._metered(self.meter) if self.meter is not None else self._bare()

    def piece(self, seconds: float) -> float:
        """Train for so long, and return the mean step, s."""
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            for _ in range(4):
                next(self._steps)
            steps += 4
        self.steps += steps
        return (time.perf_counter() - began) / steps

    def _bare(self) -> Iterator[None]:
        while True:
            for x, y in self._batches:
                output = self._model(x)
                self._optimizer.zero_grad()
                nn.functional.cross_entropy(output, y).backward()  # type: ignore[no-untyped-call]
                self._optimizer.step()
                yield

    def _metered(self, meter: NoiseMeter) -> Iterator[None]:
        while True:
            for x, y in self._batches:
                meter.begin_step()
                meter.begin_batch(len(x))
                output = meter.call(self._model, (x,), {}) if meter.wants_call else self._model(x)
                self._optimizer.zero_grad()
                nn.functional.cross_entropy(output, y).backward()  # type: ignore[no-untyped-call]
                meter.before_update(self._optimizer)
                self._optimizer.step()
                count = meter.noise.measured
                meter.end_step()
                if meter.noise.measured > count:
                    self.measuring_s.append(meter.last_cost_s)
                yield


def measure(case: str, rounds: int) -> Row:
    """Time a case."""
    bare, metered = Loop(case, metered=False), Loop(case, metered=True)
    bare.piece(WARM_UP_S / 3)
    metered.piece(WARM_UP_S)
    assert metered.meter is not None
    if metered.meter.refusal:
        raise RuntimeError(f"nothing was measured: {metered.meter.refusal}")
    metered.steps, metered.measuring_s = 0, []
    without: list[float] = []
    logs: list[float] = []
    for turn in range(rounds):
        order = (bare, metered) if turn % 2 == 0 else (metered, bare)
        took = {loop: loop.piece(PIECE_S) for loop in order}
        without.append(took[bare])
        logs.append(math.log(took[metered] / took[bare]))
    logs = winsorised(logs)
    low, high = interval(logs, 0.025)
    return {
        "model": case,
        "step_ms": 1e3 * statistics.median(without),
        "added": math.expm1(statistics.fmean(logs)),
        "low": math.expm1(low),
        "high": math.expm1(high),
        "every": metered.steps / max(1, len(metered.measuring_s)),
        "measuring_ms": 1e3 * statistics.median(metered.measuring_s or [math.nan]),
        "rounds": rounds,
    }


@click.command()
@click.option("--rounds", default=60, show_default=True, help="Pairs of pieces for each model.")
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(rounds: int, record: bool) -> None:
    """Measure."""
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        row = measure(case, rounds)
        print(
            f"{case:24} {row['step_ms']:6.2f} ms, added {row['added']:+.1%} [{row['low']:+.1%}, {row['high']:+.1%}], "
            f"one step in {row['every']:.0f}, measuring {row['measuring_ms']:.2f} ms",
            flush=True,
        )
        rows.append(row)
    if record:
        RECORD.write(rows)


if __name__ == "__main__":
    main()
