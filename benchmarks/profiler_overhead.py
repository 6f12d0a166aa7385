"""What the profiler's always-on part costs a step: bare loop and marked loop in turns, in one process.

    python -m benchmarks.profiler_overhead [--rounds 30] [--record]

Two steps are timed: one of 0.07 ms, in which every instruction shows, and one of about 3 ms. The clocks alone, then the
clocks with the looks at the stack as they are after the experiments.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel.files import write_atomic
from accel.profiler.recorder import Recorder
from accel.profiler.sampler import Sampler
from accel.profiler.session import WATCH_S

STEPS = 256


@dataclass(frozen=True)
class Cost:
    """What was added to a step."""

    step_us: float
    """Fastest bare round, mean of its steps."""
    clocks_us: float
    """Fastest round with the clocks, minus that."""
    with_looks_us: float
    """Fastest round with clocks and looks at the stack, minus that."""
    clocks_median_us: float
    """Median over rounds of the difference of neighbours."""
    rounds: int


def loop_of(width: int, depth: int) -> Callable[[], None]:
    """Return a loop of `STEPS` steps whose loader costs next to nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = (torch.randn(8, width), torch.zeros(8, dtype=torch.long))

    class Same:
        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, index: int) -> Any:
            if index >= STEPS:
                raise IndexError
            return batch

    loader: DataLoader[Any] = DataLoader(Same(), batch_size=None)  # type: ignore[arg-type]

    def loop() -> None:
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    return loop


@contextmanager
def marked(loop: Callable[[], None], *, looks: bool) -> Iterator[None]:
    """Let the clocks run, past the first steps in which the loop is learnt."""
    recorder = Recorder()
    recorder.start()
    loop()
    recorder.late = True
    loop()
    sampler = Sampler(recorder.clock, recorder.thread, threading.get_native_id(), WATCH_S)
    if looks:
        sampler.start()
    try:
        yield
    finally:
        sampler.stop()
        recorder.stop()


def microseconds(loop: Callable[[], None]) -> float:
    """Return the mean step of one round, µs."""
    began = time.perf_counter()
    loop()
    return (time.perf_counter() - began) / STEPS * 1e6


def cost(loop: Callable[[], None], rounds: int) -> Cost:
    """Time bare, clocks, clocks with looks, in turns."""
    bare, clocks, looks = [], [], []
    for _ in range(rounds):
        bare.append(microseconds(loop))
        with marked(loop, looks=False):
            clocks.append(microseconds(loop))
        with marked(loop, looks=True):
            looks.append(microseconds(loop))
    differences = [b - a for a, b in zip(bare, clocks, strict=True)]
    least = min(bare)
    return Cost(least, min(clocks) - least, min(looks) - least, statistics.median(differences), rounds)


@click.command()
@click.option("--rounds", default=30, show_default=True)
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(rounds: int, record: bool) -> None:
    """Measure."""
    torch.set_num_threads(1)
    found = {"0.07 ms step": cost(loop_of(4, 1), rounds), "3 ms step": cost(loop_of(64, 120), max(4, rounds // 4))}
    for name, seen in found.items():
        share = seen.with_looks_us / seen.step_us
        print(f"{name}: bare {seen.step_us:.1f} µs", end="; ")
        print(f"clocks +{seen.clocks_us:.1f} µs (median +{seen.clocks_median_us:.1f})", end="; ")
        print(f"with looks +{seen.with_looks_us:.1f} µs ({share:.2%})")
    if record:
        from accel.journal import machine_name

        summary = {
            "what": "what the profiler's clocks, and its looks at the stack, add to a step",
            "command": f"python -m benchmarks.profiler_overhead --rounds {rounds}",
            "date": date.today().isoformat(),
            "machine": machine_name(torch.device("cpu")),
            "torch": torch.__version__,
            "costs": {name: asdict(seen) for name, seen in found.items()},
        }
        target = Path(__file__).parent / "results" / f"profiler-overhead-cpu-{date.today().isoformat()}.json"
        write_atomic(target, json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
