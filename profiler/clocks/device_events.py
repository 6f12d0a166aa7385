"""How long the device works in each phase: an event at each mark, read some steps later, so that nothing waits.

The host runs ahead of the device, so its marks say when work was issued. An event recorded beside each mark says when
the device got there. Events are read once the device has passed them, and reused.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from accel.profiler.phases import CUT, MEANING, PROVISIONAL, SETTLED, WAS, settled

READ_AFTER_STEPS = 8
"""Steps after which events are read; by then the device has passed them, or the step is left out."""


class CudaEvent:
    """An event on a device's current stream, whichever device is the current one.

    Args:
        device: default the current one.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Let the device mark when it gets here."""
        self._event.record(torch.cuda.current_stream(self._device))

    def query(self) -> bool:
        """Return whether the device has got here."""
        passed: bool = self._event.query()  # type: ignore[no-untyped-call]
        return passed

    def elapsed_time(self, later: CudaEvent) -> float:
        """Return the ms from this event to a later one."""
        ms: float = self._event.elapsed_time(later._event)
        return ms


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
    """Records an event at each mark of a step clock.

    Args:
        write: the clock's own `write`; each pair goes there too.
        make: makes an event with `record`, `query` and `elapsed_time`; default a CUDA event on the current stream.
        each: called with phase → ms of each step that is read, in order; None if the device had not passed it.

    Attributes:
        on: False records nothing. Recording costs the host some microseconds a mark.
        steps: steps read.
    """

    def __init__(
        self,
        write: Callable[[Any], None],
        make: Callable[[], Any] = CudaEvent,
        each: Callable[[dict[str, float] | None], None] = lambda ms: None,
    ) -> None:
        self.on = False
        self.steps = 0
        self._write, self._make, self._each = write, make, each
        self._free: list[Any] = []
        self._step: list[tuple[str, Any]] = []
        self._pending: deque[list[tuple[str, Any]]] = deque()
        self._ms: defaultdict[str, float] = defaultdict(float)

    def write(self, pair: Any) -> None:
        """Write a pair to the tape, and mark a phase on the device too."""
        self._write(pair)
        if not self.on:
            return
        if pair is CUT:
            self._cut()
        elif pair[0] is WAS:
            self._step[-1:] = [(pair[1], event) for _, event in self._step[-1:]]
        elif pair[0] is SETTLED:
            self._step = [(settled(code, within=pair[1]), event) for code, event in self._step]
        elif (pair[0] in MEANING or pair[0] in PROVISIONAL) and not _is_capturing():
            event = self._free.pop() if self._free else self._make()
            event.record()
            self._step.append((pair[0], event))

    def _cut(self) -> None:
        """End a step: the mark before it belongs to both."""
        if self._step:
            self._pending.append(self._step)
            begin = self._free.pop() if self._free else self._make()
            begin.record()
            self._step = [(self._step[-1][0], begin)]
        if len(self._pending) > READ_AFTER_STEPS:
            self._read(self._pending.popleft())

    def _read(self, marks: list[tuple[str, Any]]) -> None:
        took: defaultdict[str, float] | None = None
        if marks[-1][1].query():
            took = defaultdict(float)
            for (phase, start), (_, end) in itertools.pairwise(marks):
                took[settled(phase, within=False)] += start.elapsed_time(end)
            for phase, ms in took.items():
                self._ms[phase] += ms
            self.steps += 1
        self._free += [event for _, event in marks]
        self._each(took)

    def finish(self) -> None:
        """Read all steps that have ended."""
        while self._pending:
            self._read(self._pending.popleft())

    def ms(self) -> dict[str, float]:
        """Return phase → ms per step on the device, for the steps read; {} if there are none."""
        return {phase: total / self.steps for phase, total in self._ms.items()} if self.steps else {}
