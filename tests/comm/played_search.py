"""What is played for searches: time, a slow network, and compressors that are slow."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from accel.comm.catalogue import CATALOGUE, Entry
from accel.comm.engine import gradient_engine
from accel.comm.half import Half
from accel.comm.selector import AutoComm

SLOW_S = 0.02
"""What DDP's own all-reduce of a bucket takes in the played runs."""


class PlayedTime:
    """A clock of steps that goes on where a test says so, and by 1 ms at each look: no machine is too busy for it."""

    def __init__(self) -> None:
        self._now, self._lock = 0.0, threading.Lock()

    def __call__(self) -> float:
        self.spend(1e-3)
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
    _spend, state.clock = clock.spend, clock


class Slow(Half):
    """A compressor that takes some time; with `later`, only from its second use on."""

    def __init__(self, seconds: float, later: bool) -> None:
        super().__init__()
        self.seconds, self.later = seconds, later

    def stages(self) -> Any:
        first, second = super().stages()
        _used[self.seconds] += 1
        waits = not self.later or _used[self.seconds] > 1

        def run(piece: Any, channel: Any) -> None:
            if waits:
                spend(self.seconds)
            first.run(piece, channel)

        return [first._replace(run=run), second]


_used: Counter[float] = Counter()


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


def play_catalogue(entries: dict[str, tuple[float, str]]) -> None:
    """Let the catalogue be of compressors that take so many seconds; below 0, as many once they are tried in turns."""
    CATALOGUE.clear()
    for name, (seconds, level) in entries.items():
        CATALOGUE[name] = Entry(partial(Slow, abs(seconds), seconds < 0), level)
