"""What the profiler's always-on part costs a step: bare and marked stretches of a tenth of a second in turns.

    python -m benchmarks.profiler_overhead [--rounds 60] [--record]

Two steps are timed: one of 0.07 ms, in which every instruction shows, and one of about 3 ms. The clocks alone, then the
clocks with the looks at the stack as they are after the experiments. All in one process, on the same objects: the marks
are taken out and put back between two stretches.
"""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel.files import write_atomic
from accel.profiler import callslot
from accel.profiler.recorder import Recorder
from accel.profiler.sampler import Sampler
from accel.profiler.session import WATCH_S
from accel.profiler.trial import interval, winsorised

STRETCH_S = 0.1


@dataclass(frozen=True)
class Added:
    """What was added to a step, µs: mean of winsorised differences of neighbours, and its 95 % interval."""

    us: float
    low: float
    high: float


@dataclass(frozen=True)
class Cost:
    """What the profiler adds to a step."""

    step_us: float
    """Median bare stretch, mean of its steps."""
    clocks: Added
    with_looks: Added
    """Clocks and looks at the stack."""
    rounds: int


def loop_of(width: int, depth: int) -> Callable[[int], None]:
    """Return a loop of so many steps whose loader costs next to nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = (torch.randn(8, width), torch.zeros(8, dtype=torch.long))
    length = 0

    class Same:
        def __len__(self) -> int:
            return length

        def __getitem__(self, index: int) -> Any:
            return batch

    loader: DataLoader[Any] = DataLoader(Same(), batch_size=None)  # type: ignore[arg-type]

    def loop(steps: int) -> None:
        nonlocal length
        length = steps
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    return loop


class Marks:
    """The profiler past its experiments, to be put in and taken out.

    Args:
        loop: is run for its first steps, in which the profiler learns it.
    """

    def __init__(self, loop: Callable[[int], None]) -> None:
        self._recorder = recorder = Recorder()
        recorder.start()
        loop(32)
        recorder.late = True
        loop(32)
        self._calls = [(module, callslot.held(module)) for module in recorder.roots.modules]
        self._sampler = Sampler(recorder.clock, recorder.thread, threading.get_native_id(), WATCH_S)
        self._sampler.pause(True)
        self._sampler.start()
        self._out()

    def _out(self) -> None:
        self._sampler.pause(True)
        self._recorder.probes.remove()
        for module, _ in self._calls:
            callslot.restore(module, {})

    @contextmanager
    def put_in(self, *, looks: bool) -> Iterator[None]:
        """Mark what runs within."""
        self._recorder.probes.install()
        for module, call in self._calls:
            callslot.restore(module, call)
        self._sampler.pause(not looks)
        try:
            yield
        finally:
            self._out()

    def close(self) -> None:
        """End."""
        self._sampler.stop()
        self._recorder.stop()


def cost(loop: Callable[[int], None], rounds: int) -> Cost:
    """Time bare, clocks, clocks with looks, in an order drawn anew each round."""
    steps = max(8, round(STRETCH_S / (microseconds(loop, 64) * 1e-6)))
    marks, draw = Marks(loop), random.Random(0)
    arms: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "bare": nullcontext,
        "clocks": lambda: marks.put_in(looks=False),
        "looks": lambda: marks.put_in(looks=True),
    }
    seen: dict[str, list[float]] = {name: [] for name in arms}
    try:
        for _ in range(rounds):
            for name in draw.sample(list(arms), k=len(arms)):
                with arms[name]():
                    seen[name].append(microseconds(loop, steps))
    finally:
        marks.close()
    return Cost(
        statistics.median(seen["bare"]), added(seen["bare"], seen["clocks"]), added(seen["bare"], seen["looks"]), rounds
    )


def microseconds(loop: Callable[[int], None], steps: int) -> float:
    """Return the mean step, µs."""
    began = time.perf_counter()
    loop(steps)
    return (time.perf_counter() - began) / steps * 1e6


def added(bare: list[float], marked: list[float]) -> Added:
    """Return the mean difference and its interval."""
    differences = winsorised([b - a for a, b in zip(bare, marked, strict=True)])
    return Added(statistics.fmean(differences), *interval(differences, 0.025))


@click.command()
@click.option("--rounds", default=60, show_default=True)
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(rounds: int, record: bool) -> None:
    """Measure."""
    torch.set_num_threads(1)
    found = {"0.07 ms step": cost(loop_of(4, 1), rounds), "3 ms step": cost(loop_of(64, 120), 3 * rounds)}
    for name, seen in found.items():
        print(f"{name}: bare {seen.step_us:.1f} µs; clocks {told(seen.clocks)}; with looks {told(seen.with_looks)}")
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


def told(found: Added) -> str:
    """Return it as text."""
    return f"{found.us:+.1f} µs [{found.low:+.1f}, {found.high:+.1f}]"


if __name__ == "__main__":
    main()
