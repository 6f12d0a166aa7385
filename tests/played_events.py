"""Events of a played device: one that does its work after what it was given before, by a clock of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Device(Protocol):
    """What an event needs of its device."""

    now_s: float
    """The host's time."""
    free_at: float
    """When the device has done all that it was given."""


class Event:
    """Is passed when the work before it is done."""

    def __init__(self, device: Device) -> None:
        self.device, self.at_s = device, 0.0

    def record(self) -> None:
        self.at_s = max(self.device.now_s, self.device.free_at)

    def query(self) -> bool:
        return self.at_s <= self.device.now_s

    def synchronize(self) -> None:
        self.device.now_s = max(self.device.now_s, self.at_s)

    def elapsed_time(self, later: Event) -> float:
        assert self.query() and later.query()
        return (later.at_s - self.at_s) * 1e3


def counted(device: Device) -> tuple[list[Event], Callable[[], Event]]:
    """Return a list of the events that are made, and what makes them."""
    made: list[Event] = []

    def make() -> Event:
        made.append(Event(device))
        return made[-1]

    return made, make
