"""A process that takes turns with others: it stops itself between two steps, and its clocks stand still meanwhile.

    python -m benchmarks.turn_clock 2 whole_process ncf reordered --seconds 60

is `python -m benchmarks.whole_process ncf …` in turns of two seconds, for `benchmarks.turns` to start and to wake. The
module's command gets what ends a turn as its context's object, and when it was started as `--launched`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
_CLOCKS = ("time", "perf_counter", "monotonic")


class TurnClock:
    """Stops this process between two steps when its turn is over, and a GPU has done what it was asked for in it.

    Args:
        turn_s: least length of a turn, s.
        stop: stops the process until its next turn.

    Attributes:
        stopped_s: how long it has been stopped so far.
        foreign_s: core seconds that the others used meanwhile.
    """

    def __init__(self, turn_s: float, stop: Callable[[], None]) -> None:
        self.stopped_s = self.foreign_s = 0.0
        self._turn_s, self._stop = turn_s, stop
        self._real: dict[str, Callable[[], Any]] = {}
        self._busy: Callable[..., float | None] | None = None
        self._began = 0.0

    def install(self) -> None:
        """Make this process's clocks, and accel's meter of crowds, stand still while it is stopped."""
        for name in _CLOCKS:
            for each, unit in ((name, 1), (f"{name}_ns", 10**9)):
                real = self._real[each] = getattr(time, each)
                setattr(time, each, self._standing(real, unit))
        from accel.profiler import host

        self._busy = host._busy_seconds
        host._busy_seconds = self._own_busy_seconds
        self._began = time.perf_counter()

    def _standing(self, real: Callable[[], Any], unit: int) -> Callable[[], Any]:
        return lambda: real() - type(real())(self.stopped_s * unit)

    def _own_busy_seconds(self, proc: Path, cores: frozenset[int]) -> float | None:
        busy = self._busy(proc, cores) if self._busy is not None else None
        return None if busy is None else busy - self.foreign_s

    def __call__(self) -> None:
        """Stop if the turn is over: to be called between two steps."""
        if time.perf_counter() - self._began < self._turn_s:
            return
        drain_device()
        cores = frozenset(os.sched_getaffinity(0))
        at, before = self._real["perf_counter"](), self._own_busy_seconds(Path("/proc"), cores)
        self._stop()
        after = self._own_busy_seconds(Path("/proc"), cores)
        self.stopped_s += self._real["perf_counter"]() - at
        self.foreign_s += (after or 0.0) - (before or 0.0)
        self._began = time.perf_counter()


def drain_device() -> None:
    """Wait for what this process has asked of its GPU: queued steps would run in the next process's turn."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def end_with_parent() -> None:
    """Let the system kill this process when the one that gives turns is gone: nobody else would wake it."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def stop_this_group() -> None:
    """Stop this process and its children until somebody sends SIGCONT to them all."""
    os.killpg(os.getpgrp(), signal.SIGSTOP)


if __name__ == "__main__":
    launched = time.time()
    end_with_parent()
    clock = TurnClock(float(sys.argv[1]), stop_this_group)
    clock.install()  # before anything asks for the time
    module = importlib.import_module(f"benchmarks.{sys.argv[2]}")
    module.main([*sys.argv[3:], f"--launched={launched}"], obj=clock)
