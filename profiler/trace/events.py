"""A traced window as plain events: what the host called, what the device did, where the host waited for it.

Times are in µs on one clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from accel.profiler.trace import operators
from accel.profiler.trace.intervals import Interval


@dataclass(slots=True, kw_only=True)
class OperatorCall:
    """One operator call on the host."""

    name: str
    start: float
    end: float
    thread: int = 0
    id: int = 0
    """The id that device work and waits refer to as their operator."""
    shapes: Sequence[Sequence[int]] = ()
    dtypes: Sequence[str] = ()
    scalars: Sequence[Any] = ()

    @property
    def flops(self) -> float | None:
        """Floating-point operations; None where they are not known."""
        return operators.flops(self.name, self.shapes, self.scalars)

    @property
    def moved_bytes(self) -> float | None:
        """Bytes read and written; None where they are not known."""
        return operators.moved_bytes(self.name, self.shapes, self.dtypes)


@dataclass(slots=True, kw_only=True)
class Work:
    """One piece of device work."""

    name: str
    start: float
    end: float
    launch: float | None = None
    """When the host launched it; None if that was not recorded."""
    kind: Literal["kernel", "memory", "copy in", "copy out"] = "kernel"
    """`memory` is a memset or a copy on the device."""
    operator: int = 0
    """The call that launched it, 0 if none did."""


@dataclass(slots=True, kw_only=True)
class Wait:
    """One runtime call in which the host waited for the device."""

    name: str
    start: float
    end: float
    operator: int = 0
    call: int = 0
    """The runtime call's own number."""
    file: str = ""
    line: int = 0


@dataclass(kw_only=True)
class Trace:
    """Everything recorded in a window."""

    window: Interval
    calls: list[OperatorCall]
    works: list[Work] | None = None
    """None without a GPU."""
    waits: list[Wait] = field(default_factory=list)
    updates: list[Interval] = field(default_factory=list)
    """When the host was in an optimizer's step."""
