"""What is played for searches: time, a slow network, and compressors that lie."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from accel.comm.catalogue import CATALOGUE, Entry
from accel.comm.cost_model.cost import Link, Network
from accel.comm.engine import gradient_engine
from accel.comm.half import Half
from accel.comm.selection.planner import StepRecorder
from accel.comm.selector import AutoComm

SLOW_S = 0.02
"""What DDP's own all-reduce of a bucket takes in the played runs."""


class PlayedTime:
    """A clock of steps that goes on where a test says so, and by 10 us at each look: no machine is too busy for it."""

    def __init__(self) -> None:
        self._now, self._lock = 0.0, threading.Lock()

    def __call__(self) -> float:
        self.spend(1e-5)
        return self._now

    def spend(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds


_spend: Callable[[float], None] = time.sleep


def spend(seconds: float) -> None:
    """Let so much time pass, of this machine's or, once it is played, of the played one."""
    _spend(seconds)


def play_time(state: AutoComm) -> None:
    """Let the steps of a search last as long as what `spend` was asked for."""
    global _spend
    clock = PlayedTime()
    _spend, state.recorder = clock.spend, StepRecorder(torch.device("cpu"), clock)


class Lying(Half):
    """A compressor that is quick in a dry run and slow in earnest; below 0 it is as slow in both, and works for it."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def stages(self) -> Any:
        first, second = super().stages()

        def run(piece: Any, channel: Any) -> None:
            if self.seconds > 0 and threading.current_thread().name.startswith("accel-comm"):
                spend(self.seconds)
            end = time.thread_time() - self.seconds
            while self.seconds < 0 and time.thread_time() < end:
                pass
            first.run(piece, channel)

        return [first._replace(run=run), second]


def slow_plain() -> None:
    """Let DDP's own all-reduce take SLOW_S."""
    real = dist.all_reduce

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        def all_reduce(self, *arguments: Any, **options: Any) -> Any:
            spend(SLOW_S)
            return real(*arguments, **options)

    gradient_engine.dist = Slow()  # type: ignore[assignment]


def played_network(world: int, byte_s: float) -> Network:
    link = Link(1e-4, 1e-5, byte_s)
    return Network(world, 1, link, link, link, cores=4.0)


def play_catalogue(entries: dict[str, tuple[float, str]]) -> None:
    """Let the catalogue be of compressors that lie by so many seconds."""
    CATALOGUE.clear()
    for name, (seconds, level) in entries.items():
        CATALOGUE[name] = Entry(lambda seconds=seconds: Lying(seconds), level)  # type: ignore[misc]
