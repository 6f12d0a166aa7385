"""Several training runs side by side: one process each, one at a time, in short turns.

Each variant runs in a process of its own, so that what it changes (threads, precision switches, worker processes) can't
touch the others. A variant trains only while it holds the turn; turns go round in the order A B C C B A …, so that a
drift of the machine falls on all alike. Ratios come from neighbouring turns (`benchmarks.spread.ratio`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

Train = Callable[..., Any]


class Turn:
    """The child's side: called after each step, it waits for its next turn when this one is over."""

    def __init__(self, pipe: Connection, clock: Callable[[], float] = time.perf_counter) -> None:
        self._pipe = pipe
        self._clock = clock
        self._away = 0.0
        self._left = 0
        self._times: list[float] = []
        self._mark = 0.0

    def __call__(self, step: int, info: Callable[[], Any] = lambda: None) -> None:
        """End a step; `info` is asked for what to tell the parent at the end of a turn."""
        now = self.now()
        self._times.append(now - self._mark)
        self._left -= 1
        if self._left <= 0:
            self._pipe.send(("turn", self._times, info()))
            self.wait()
        self._mark = self.now()

    def wait(self) -> None:
        """Wait for the turn."""
        began = self._clock()
        self._left, self._times = self._pipe.recv(), []
        self._away += self._clock() - began
        self._mark = self.now()

    def is_over(self) -> bool:
        """True if no more steps are wanted of what is trained now; `wait` then waits for what comes next."""
        return self._left == 0

    def now(self) -> float:
        """Return seconds on a clock that stands while others have the turn."""
        return self._clock() - self._away


def _child(pipe: Connection, train: Train, options: dict[str, Any]) -> None:
    turn = Turn(pipe)
    # For all in this process: the wait for a turn is none of the loop's time, and what measures the loop (accel, too,
    # which is not imported yet) would take it for that, blame it, and search again.
    time.perf_counter = turn.now
    try:
        turn.wait()
        pipe.send(("done", train(on_step=turn, **options), None))
    except (EOFError, BrokenPipeError):
        return  # the parent has seen enough
    except Exception:
        pipe.send(("failed", traceback.format_exc(), None))


@dataclass
class Racer:
    """The parent's side of one variant."""

    name: str
    process: Any
    pipe: Connection
    turns: list[list[float]] = field(default_factory=list)
    """Step times of each turn, s."""
    info: Any = None
    result: Any = None
    done: bool = False

    def run(self, steps: int) -> list[float]:
        """Give the turn for some steps and return their times; an empty list when the training is over."""
        if self.done:
            return []
        self.pipe.send(steps)
        kind, payload, info = self.pipe.recv()
        if kind == "failed":
            raise RuntimeError(f"variant {self.name} failed:\n{payload}")
        if kind == "done":
            self.done, self.result = True, payload
            return []
        self.info = info
        self.turns.append(payload)
        return list(payload)

    def leave(self) -> None:
        """End what is trained now: the child sees `Turn.is_over`, and may wait for a turn with something else."""
        self.turns, self.info = [], None
        if not self.done:
            self.pipe.send(0)


@contextlib.contextmanager
def racers(variants: dict[str, tuple[Train, dict[str, Any]]]) -> Iterator[dict[str, Racer]]:
    """Start one process per variant; `train(on_step=…, **options)` must be importable. Ends them all on leaving."""
    context = multiprocessing.get_context("spawn")
    started: dict[str, Racer] = {}
    try:
        for name, (train, options) in variants.items():
            ours, theirs = context.Pipe()
            # Not a daemon: a training process has loader workers of its own.
            process = context.Process(target=_child, args=(theirs, train, options), name=f"accel-{name}")
            process.start()
            theirs.close()
            started[name] = Racer(name, process, ours)
        yield started
    finally:
        for racer in started.values():
            racer.pipe.close()
            racer.process.join(timeout=0.5)
            if racer.process.is_alive():
                racer.process.terminate()
                racer.process.join()
