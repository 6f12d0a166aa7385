"""What the profiler's always-on part costs a step: pieces of some 25 ms, bare and marked in turns.

    python -m benchmarks.profiler_overhead [--rounds 60]

Two steps are timed: one of 0.07 ms, in which every instruction shows, and one of about 3 ms. The clocks alone, and the
clocks with the looks at the stack as they are after the experiments. All in one process, on the same objects: the marks
are taken out and put back between two pieces.

A round of one arm is eight pieces of either kind. Each of its sides is a whole epoch, from the making of the iterator
on, so that what comes only now and then (an epoch's start, a stored segment of the tape, a sample of the stack) comes
at its ordinary rate. Figures are the median of the differences of neighbouring pieces, and the 95 % interval of that
median by order statistics; beside it their mean, in which a disturbance of the machine counts as much as what is rare.
The exit status is 1 if an interval lies beyond its bound.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import click
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel.profiler.loop import callslot
from accel.profiler.loop.recorder import Recorder
from accel.profiler.session import WATCH_S
from accel.profiler.system.instruments import Sampler
from benchmarks.spread import median_interval

PIECE_S = 0.025
PIECES = 8
"""Pieces of either kind in a round."""
STEPS = {"0.07 ms step": (4, 1), "3 ms step": (64, 120)}
"""Step → width and depth of its model."""
BOUNDS = {"0.07 ms step": (0.14, math.inf), "3 ms step": (0.01, 0.01)}
"""Step → the most that the clocks, and clocks and looks, may add, as shares of it."""
SETTLING = 1
"""Steps after a switch that are not timed: a class that was changed has lost its caches in the interpreter."""

Train = Callable[[int], Iterator[None]]


@dataclass(frozen=True)
class Added:
    """What was added to a step, µs: median of the differences of neighbours, and its 95 % interval."""

    us: float
    low: float
    high: float
    mean: float


@dataclass(frozen=True)
class Cost:
    """What the profiler adds to a step."""

    step_us: float
    """Median of the bare pieces' mean steps."""
    clocks: Added
    with_looks: Added
    """Clocks and looks at the stack."""


def loop_of(width: int, depth: int) -> Train:
    """Return a loop over an epoch of so many steps, which stops after each; its loader costs next to nothing."""
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

    def loop(steps: int) -> Iterator[None]:
        nonlocal length
        length = steps
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            yield

    return loop


class Marks:
    """The profiler past its experiments, to be put in and taken out.

    Args:
        loop: is run for its first steps, in which the profiler learns it.
    """

    def __init__(self, loop: Train) -> None:
        self._recorder = recorder = Recorder()
        recorder.start()
        microseconds(loop(32), 32)
        recorder.delivery.deferred = True
        microseconds(loop(1024), 1024)  # until it knows how many steps a second has
        self._calls = [(module, callslot.contents(module)) for module in recorder.roots.modules]
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


def cost(loop: Train, rounds: int) -> Cost:
    """Time each arm against bare pieces between its own, the arms in an order drawn anew."""
    piece = max(8, round(PIECE_S / (microseconds(loop(64), 64) * 1e-6)))
    marks, draw = Marks(loop), random.Random(0)
    arms: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "clocks": lambda: marks.put_in(looks=False),
        "looks": lambda: marks.put_in(looks=True),
    }
    bare: list[float] = []
    seen: dict[str, list[float]] = {name: [] for name in arms}
    try:
        for _ in range(rounds):
            for name in draw.sample(list(arms), k=len(arms)):
                plain, marked = in_turns(loop, piece, arms[name], marked_first=draw.random() < 0.5)
                bare += plain
                seen[name] += [b - a for a, b in zip(plain, marked, strict=True)]
    finally:
        marks.close()
    told = {name: added(differences) for name, differences in seen.items()}
    return Cost(statistics.median(bare), told["clocks"], told["looks"])


def in_turns(
    loop: Train, piece: int, marks: Callable[[], AbstractContextManager[None]], *, marked_first: bool
) -> tuple[list[float], list[float]]:
    """Return the mean steps of the pieces of a bare and of a marked epoch, µs, taken in turns A B B A A B B A …"""
    length = PIECES * (piece + SETTLING)
    contexts = {False: nullcontext, True: marks}
    epochs = {False: loop(length), True: loop(length)}
    pieces: dict[bool, list[float]] = {False: [], True: []}
    order = [marked_first, not marked_first]
    for _ in range(PIECES):
        for marked in order:
            with contexts[marked]():
                if pieces[marked]:  # an epoch's first step makes its iterator, which counts
                    microseconds(epochs[marked], SETTLING)
                pieces[marked].append(microseconds(epochs[marked], piece))
        order.reverse()
    return pieces[False], pieces[True]


def microseconds(steps: Iterator[None], count: int) -> float:
    """Take so many steps and return the mean, µs."""
    began = time.perf_counter()
    for _ in range(count):
        next(steps)
    return (time.perf_counter() - began) / count * 1e6


def added(differences: list[float]) -> Added:
    """Return the median, its interval and the mean."""
    return Added(*median_interval(differences), statistics.fmean(differences))


@click.command()
@click.option("--rounds", default=60, show_default=True)
def main(rounds: int) -> None:
    """Measure."""
    torch.set_num_threads(1)
    found = {name: cost(loop_of(*size), rounds) for name, size in STEPS.items()}
    beyond = [name for name, seen in found.items() if is_beyond(name, seen)]
    for name, seen in found.items():
        print(f"{name}: bare {seen.step_us:.1f} µs; clocks {told(seen.clocks)}; with looks {told(seen.with_looks)}")
    if beyond:
        sys.exit(f"beyond its bound: {', '.join(beyond)}")


def is_beyond(name: str, seen: Cost) -> bool:
    """Return whether what is added to a step, by clocks alone or with looks, is surely more than its share of it."""
    both = zip((seen.clocks, seen.with_looks), BOUNDS[name], strict=True)
    return any(added.low > share * seen.step_us for added, share in both)


def told(found: Added) -> str:
    """Return it as text."""
    return f"{found.us:+.1f} µs [{found.low:+.1f}, {found.high:+.1f}], mean {found.mean:+.1f}"


if __name__ == "__main__":
    main()
