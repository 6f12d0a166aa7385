"""What a GPU takes: for each phase, for each step, and for what a stretch of steps leaves in its queue.

The host runs ahead of the device, so its marks say when work was issued. An event recorded beside each mark says when
the device got there. Nothing waits for an event, and events are used again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from accel.profiler.interruptions import ours
from accel.profiler.loop.clock import CUT, PROVISIONAL, RESUME, SETTLED, SKIP, STEP, WAS, StepClock, settled
from accel.profiler.loop.patches import Patches, replace_copies
from accel.profiler.loop.steps import is_capturing
from accel.profiler.phases import MEANING, PHASES, Measurement

log = logging.getLogger("accel")

MOST_PENDING = 256
"""Steps of which events are kept until the device passes them; the oldest is left out then. A queue holds some thousand
kernels, and a loop of a few kernels a step runs a hundred steps ahead."""
_ASIDE = ".aside"
"""In place of a phase: the device waited for the profiler."""


class CudaEvent:
    """An event on one stream of a device, whichever are the current ones when it is recorded."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Let the device mark when it gets here."""
        self._event.record(self._stream)

    def query(self) -> bool:
        """Return whether the device has got here."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Wait until the device gets here."""
        self._event.synchronize()

    def elapsed_time(self, later: CudaEvent) -> float:
        """Return the ms from this event to a later one."""
        return float(self._event.elapsed_time(later._event))


def events_on(device: torch.device) -> Callable[[], CudaEvent]:
    """Return what makes events on the stream that a loop uses now for a device.

    The device need not be the current one (a model on cuda:1), and a loop may copy its batches on another stream.
    """
    return functools.partial(CudaEvent, torch.cuda.current_stream(device))


class DeviceEvents:
    """Records an event at each mark of a step clock, between `start` and `stop`.

    Recording costs the host some microseconds a mark. An error, as after a failed assertion on the device, ends it: the
    loop goes on to its own error.

    Args:
        write: the clock's own `write`; each pair goes there too.
        number: tells the number of the step that ends.

    Attributes:
        taken: number of a step → phase → s on the device, without the first step, which began before `start`.
    """

    def __init__(self, write: Callable[[Any], None], number: Callable[[], int]) -> None:
        self.taken: dict[int, dict[str, float]] = {}
        self._write, self._number = write, number
        self._make: Callable[[], Any] | None = None
        self._free: list[Any] = []
        self._step: list[tuple[str, Any]] = []
        self._code: str | None = None
        self._is_whole = False
        self._pending: deque[tuple[int, list[tuple[str, Any]]]] = deque()

    def start(self, make: Callable[[], Any]) -> None:
        """Begin with the next step, with events that `make` makes."""
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

    def append(self, entry: Any, /) -> None:
        """Take a phase, or the time of the phase before it, as the tape of a clock does."""
        if self._code is None or isinstance(entry, str):  # Ctrl-C may have come before the time
            self._code = entry
            return
        code, self._code = self._code, None
        self.write(CUT if code is STEP else (code, entry))

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
        elif (code in MEANING or code in PROVISIONAL) and not is_capturing():
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


class DeviceSteps:
    """Mark a session clock's phases on the device too, and the copies to it of the thread that makes this.

    Args:
        clock: whose marks are followed.
        number: tells the number of the step that ends.
        device: where the model is.
        counts: returns whether the loop's own step is under way.
    """

    def __init__(
        self,
        clock: StepClock,
        number: Callable[[], int],
        device: torch.device,
        counts: Callable[[], bool] = lambda: True,
    ) -> None:
        self._clock, self._device, self._counts = clock, device, counts
        self._patches = Patches()
        self._events = DeviceEvents(clock.write, number)

    def install(self) -> None:
        """Begin with the next step."""
        self._patches.replace(self._clock, "write", lambda original: self._events.write)
        replace_copies(self._patches, self._copying, get_ident())
        self._events.start(events_on(self._device))

    def remove(self) -> None:
        """Mark no more."""
        self._events.stop()
        self._patches.remove()

    def apply(self, steps: list[Measurement]) -> None:
        """Let the steps have the device's times, and leave out those of which they are not known, as of the first one.

        By the host's clock that one would be the shortest: it began with an idle device and only queued its work.
        Where most are not known, all keep the host's times.
        """
        self._events.stop()
        taken = self._events.taken
        timed = [step for step in steps if step.step in taken]
        if len(timed) < len(steps) / 2:
            return
        steps[:] = timed
        for step in steps:
            step.phases = {phase: taken[step.step].get(phase, 0.0) for phase in PHASES}
            step.seconds = sum(step.phases.values())

    def _copying(self) -> Callable[[], None] | None:
        # Without gradients it is an evaluation that copies.
        if not self._patches.on or not torch.is_grad_enabled() or not self._counts():
            return None
        before = self._clock.code
        self._clock.enter("copy")
        return functools.partial(self._clock.enter, before)


class DeviceClock:
    """Time whole steps by events that `make` makes; inert until a step is said to begin."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._open: list[Any] | None = None
        """Marks of the step under way: by turns it goes on and stands still."""
        self._ended: dict[int, list[Any]] = {}
        self._free: list[Any] = []
        self._later_s = 0.0
        """What the last step took after its last mark."""
        self._fails = False

    def begin(self) -> None:
        """Begin a step."""
        if not self._fails:
            self._free += self._open or []
            self._open = []
            self.mark()

    def begin_again(self) -> None:
        """Begin the step under way only now."""
        if self._open is not None:
            self.begin()

    def mark(self) -> None:
        """Leave out what the device does from here on; at the next mark, count it again."""
        if self._open is None:
            return
        try:
            event = self._free.pop() if self._free else self._make()
            event.record()
        except ours():  # the host's times are left, and the loop goes on
            self._fail()
        else:
            self._open.append(event)

    def end(self, number: int) -> None:
        """End the step under way, whose number this is."""
        self.mark()
        if self._open is not None:
            self._ended[number], self._open = self._open, None
            self._later_s = 0.0

    def is_passed(self) -> bool:
        """Return whether the device has done the last step, as far as events on the current stream can tell."""
        last = next(reversed(self._ended.values()), None)
        try:
            return last is not None and bool(last[-1].query())
        except ours():
            self._fail()
            return False

    def went_on(self, seconds: float) -> None:
        """Note that the device was busy after the last step's last mark: the step's work is on another stream."""
        self._later_s = seconds

    def seconds(self) -> dict[int, float]:
        """Return what each step took that has ended since the last call, by number; the device must be idle."""
        try:
            took = {number: _took_s(marks) for number, marks in self._ended.items() if len(marks) % 2 == 0}
        except ours():
            self._fail()
            return {}
        if took:
            took[next(reversed(took))] += self._later_s
        self.forget()
        return took

    def forget(self) -> None:
        """Forget the steps that have ended."""
        self._free += itertools.chain.from_iterable(self._ended.values())
        self._ended.clear()

    def close(self) -> None:
        """Record no more, and let all events go."""
        self._fails, self._open = True, None
        self._ended.clear()
        self._free.clear()

    def _fail(self) -> None:
        self.close()
        log.debug("no events on the device", exc_info=True)


def _took_s(marks: list[Any]) -> float:
    took_ms: float = sum(start.elapsed_time(end) for start, end in zip(marks[::2], marks[1::2], strict=True))
    return took_ms / 1e3


def drained_s(device: torch.device, now: Callable[[], float]) -> float:
    """Wait until a GPU has done what was queued, and return the seconds until then; 0 for another device."""
    if device.type != "cuda":
        return 0.0
    began = now()
    with contextlib.suppress(RuntimeError):  # an error of the script's, which its next call raises
        torch.cuda.synchronize(device)
    return now() - began


class Backlog:
    """Corrects the host's time for a stretch of steps.

    Args:
        now: the host's clock, s.
        synchronize: waits until the device has done its work.
        make: makes an event.
    """

    def __init__(self, now: Callable[[], float], synchronize: Callable[[], Any], make: Callable[[], Any]) -> None:
        self._now, self._synchronize = now, synchronize
        self._idle, self._start = make(), make()
        self._idle_at = self._start_at = 0.0

    def drain(self) -> None:
        """Wait for the device; a step or more should follow before the stretch begins."""
        self._synchronize()
        self._idle.record()
        self._idle_at = self._now()

    def begin(self) -> None:
        """Begin the stretch."""
        self._start.record()
        self._start_at = self._now()

    def end(self) -> float:
        """End it: wait for the device, and return how much longer than the host it took for the stretch, s."""
        ended_at = self._now()
        self._synchronize()
        before_s: float = self._idle_at + self._idle.elapsed_time(self._start) / 1e3 - self._start_at
        after_s = self._now() - ended_at
        return after_s - max(0.0, before_s)
