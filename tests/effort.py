"""How much Python a piece of code runs, in calls and instructions: a busy machine doesn't change them."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass(frozen=True)
class Effort:
    """What the interpreter did."""

    calls: float
    """Of functions, those written in C included."""
    instructions: float
    """Of bytecode."""

    def __sub__(self, other: Effort) -> Effort:
        return Effort(self.calls - other.calls, self.instructions - other.instructions)


def median(efforts: Iterable[Effort]) -> Effort:
    calls, instructions = zip(*((effort.calls, effort.instructions) for effort in efforts), strict=True)
    return Effort(statistics.median(calls), statistics.median(instructions))


def of(work: Callable[[], Any]) -> Effort:
    """Run `work` and return what the interpreter did for it in this thread."""
    calls = instructions = 0

    def called(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def traced(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal instructions
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        instructions += event == "opcode"
        return traced

    tracer, profiler = sys.gettrace(), sys.getprofile()
    sys.settrace(traced)
    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(profiler)
        sys.settrace(tracer)
    return Effort(calls, instructions)
