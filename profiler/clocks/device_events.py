"""How long the device takes for each phase: an event at each mark, read once the device has passed it.

The host runs ahead of the device, so its marks say when work was issued. An event recorded beside each mark says when
the device got there. Nothing waits for an event, and events are used again.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from accel.profiler.interruptions import ours
from accel.profiler.phases import MEANING, PROVISIONAL, RESUME, SETTLED, SKIP, STEP, WAS, settled

log = logging.getLogger("accel")

MOST_PENDING = 256
"""Steps of which events are kept until the device passes them; the oldest is left out then. A queue holds some thousand
kernels, and a loop of a few kernels a step runs a hundred steps ahead."""
_ASIDE = ".aside"
"""In place of a phase: the device waited for the profiler."""


class CudaEvent:
    """An event on one stream of a device, whichever are the current ones when it is recorded.

    Args:
        stream: whose work is timed.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Let the device mark when it gets here."""
        self._event.record(self._stream)

    def query(self) -> bool:
        """Return whether the device has got here."""
        passed: bool = self._event.query()  # type: ignore[no-untyped-call]
        return passed

    def synchronize(self) -> None:
        """Wait until the device gets here."""
        self._event.synchronize()

    def elapsed_time(self, later: CudaEvent) -> float:
        """Return the ms from this event to a later one."""
        ms: float = self._event.elapsed_time(later._event)
        return ms


def events_on(device: torch.device) -> Callable[[], CudaEvent]:
    """Return what makes events on the stream that a loop uses now for a device.

    The device need not be the current one (a model on cuda:1), and a loop may copy its batches on another stream.
    """
    return functools.partial(CudaEvent, torch.cuda.current_stream(device))


def _is_capturing() -> bool:
    """Return whether the current stream records a graph: an event would become a part of that."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return started and torch.cuda.is_current_stream_capturing()


def has_gpu() -> bool:
    """Return whether there is a GPU, without starting CUDA.

    From its start on, a process can't fork ranks that use CUDA, and CUDA_VISIBLE_DEVICES can no longer be set:
    `torch.cuda.is_available` would start it, while this asks the driver's management library.
    """
    return torch.cuda.device_count() > 0


class DeviceEvents:
    """Records an event at each mark of a step clock, between `start` and `stop`.

    Recording costs the host some microseconds a mark. An error, as after a failed assertion on the device, ends it: the
    loop goes on to its own error.

    Args:
        write: the clock's own `write`; each pair goes there too.
        number: tells the number of the step that ends.

    Attributes:
        taken: number of a step → phase → s on the device, for the steps that were read. The first one after `start` is
            not among them: it began before.
    """

    def __init__(self, write: Callable[[Any], None], number: Callable[[], int]) -> None:
        self.taken: dict[int, dict[str, float]] = {}
        self._write, self._number = write, number
        self._make: Callable[[], Any] | None = None
        self._free: list[Any] = []
        self._step: list[tuple[str, Any]] = []
        self._is_whole = False
        self._pending: deque[tuple[int, list[tuple[str, Any]]]] = deque()

    def start(self, make: Callable[[], Any]) -> None:
        """Begin with the next step.

        Args:
            make: makes an event with `record`, `query`, `synchronize` and `elapsed_time`.
        """
        self._make, self._is_whole = make, False
        self._free, self._step = [], []  # the earlier ones may be of another device
        self._pending.clear()

    def stop(self) -> None:
        """Wait until the device has passed all events, read them, and record no more."""
        if self._make is None:
            return
        try:
            if self._pending:
                self._pending[-1][1][-1][1].synchronize()
            self._read_passed()
        except ours():
            log.debug("no events on the device", exc_info=True)
        self._make = None

    def write(self, pair: Any) -> None:
        """Write a pair to the tape, and mark a phase on the device too."""
        self._write(pair)
        if self._make is not None:
            try:
                self._mark(*pair)
            except ours():
                self._make = None
                log.debug("no events on the device", exc_info=True)

    def _mark(self, code: str, value: Any) -> None:
        if code == STEP:
            self._cut()
        elif code == WAS:
            self._step[-1:] = [(value, event) for _, event in self._step[-1:]]
        elif code == SETTLED:
            self._step = [(settled(phase, within=value), event) for phase, event in self._step]
        elif code == RESUME:
            self._begin(self._step)
        elif code == SKIP and self._step:
            phase, event = self._step[-1]
            self._step[-1] = (_ASIDE, event)
            self._step.append((phase, self._recorded()))
        elif (code in MEANING or code in PROVISIONAL) and not _is_capturing():
            self._step.append((code, self._recorded()))

    def _cut(self) -> None:
        """End a step at its last mark, and begin the next one."""
        ended, was_whole = self._step, self._is_whole
        self._step, self._is_whole = [], bool(ended)
        if ended:
            self._step = [(ended[-1][0], self._recorded())]
        if was_whole:
            self._pending.append((self._number(), ended))
        else:
            self._free += [event for _, event in ended]
        if len(self._pending) > MOST_PENDING:
            self._free += [event for _, event in self._pending.popleft()[1]]
        self._read_passed()

    def _begin(self, marks: list[tuple[str, Any]]) -> None:
        """Begin the open step only now, in the phase that is open."""
        if marks:
            self._free += [event for _, event in marks]
            self._step = [(marks[-1][0], self._recorded())]

    def _recorded(self) -> Any:
        assert self._make is not None
        event = self._free.pop() if self._free else self._make()
        event.record()
        return event

    def _read_passed(self) -> None:
        while self._pending and self._pending[0][1][-1][1].query():
            number, marks = self._pending.popleft()
            took = self.taken[number] = {}
            for (phase, start), (_, end) in itertools.pairwise(marks):
                if phase != _ASIDE:
                    phase = settled(phase, within=False)
                    took[phase] = took.get(phase, 0.0) + start.elapsed_time(end) / 1e3
            self._free += [event for _, event in marks]
