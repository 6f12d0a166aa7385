"""Values of a GPU that are read some calls after they were computed, without waiting for what was queued since.

`item()` copies on the current stream, and so waits for all that was launched before it, the present call's kernels
among it: however old the value is, the host loses its lead. So each value is copied to page-locked memory where it is
computed, with an event behind the copy, and read once the event has come. If the host is further ahead than that, a
later call reads it. Only where very many are under way is the oldest waited for.

    GPU     ... call 1, copy, event | call 2, copy, event | ...
    host    launches call 9, and reads the value of call 1 if its event has come
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

_MOST = 64


class Place(Protocol):
    """Where a value waits until it is read; used for one after another."""

    def put(self, value: Tensor) -> None:
        """Begin to hold a value."""

    def is_ready(self) -> bool:
        """Return whether it can be read without waiting."""

    def read(self) -> float:
        """Return it, and hold it no more; wait for it if need be."""


class PlainPlace:
    """Holds the tensor itself: one of the CPU, or of a device that has no events of CUDA's."""

    def __init__(self) -> None:
        self._value: Tensor | None = None

    def put(self, value: Tensor) -> None:
        """Hold it."""
        self._value = value

    def is_ready(self) -> bool:
        """It can always be asked for."""
        return True

    def read(self) -> float:
        """Return it, and hold it no more."""
        assert self._value is not None
        value, self._value = self._value, None
        return float(value)


class PinnedPlace:
    """A number in page-locked memory, and the event that tells when the GPU has written it.

    Args:
        dtype: of the values.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        # What is made in inference mode can't be written in the next training step.
        with torch.inference_mode(False):
            self._number = torch.empty((), dtype=dtype, device="cpu", pin_memory=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def put(self, value: Tensor) -> None:
        """Queue the copy of a value behind the kernels that compute it."""
        self._number.copy_(value, non_blocking=True)
        self._event.record(torch.cuda.current_stream(value.device))

    def is_ready(self) -> bool:
        """Return whether the copy is there."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> float:
        """Return the value; wait for its copy, and for nothing that was queued after it."""
        self._event.synchronize()
        return float(self._number)


def place_for(value: Tensor) -> Place:
    """Return a new place for values like this one."""
    return PinnedPlace(value.dtype) if value.is_cuda else PlainPlace()


class LateValues:
    """Numbers, one a call, that are read some calls late and in their order.

    Args:
        calls: values that are always under way; the youngest ones.
        most: values that may be under way; beyond it the oldest is waited for.
        place: makes a place for values like the given one.
    """

    def __init__(self, calls: int, most: int = _MOST, place: Callable[[Tensor], Place] = place_for) -> None:
        self._calls, self._most, self._place = calls, most, place
        self._under_way: deque[tuple[list[Place], Place]] = deque()
        """Each with the list that it goes back to."""
        self._free: dict[tuple[torch.device, torch.dtype], list[Place]] = {}
        """Places that were used: page-locking memory anew takes longer than a small model's call."""

    def note(self, value: Tensor) -> None:
        """Add the value of the present call."""
        free = self._free.setdefault((value.device, value.dtype), [])
        place = free.pop() if free else self._place(value)
        place.put(value)
        self._under_way.append((free, place))

    def due(self) -> list[float]:
        """Return those of enough calls ago that have arrived since, the oldest first."""
        values: list[float] = []
        while len(self._under_way) > self._calls:
            free, place = self._under_way[0]
            if len(self._under_way) <= self._most and not place.is_ready():
                break
            self._under_way.popleft()  # first: one that can't be read must not hold up the others
            values.append(place.read())
            free.append(place)
        return values
