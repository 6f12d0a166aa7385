"""Steps as the device takes them: the phases of a few steps by its own clock.

The host runs ahead of a GPU until it has to wait for it, which most loops do where they copy their next batch: by the
host's clock two thirds of a BERT's step were in that line. By the device's, each phase has what the device did in it or
waited for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident

import torch

from accel.profiler.clocks import copies, device_events
from accel.profiler.clocks.device_events import DeviceEvents
from accel.profiler.clocks.probes import Patches
from accel.profiler.phases import PHASES, RESUME, Measurement, StepClock


class DeviceSteps:
    """Mark a clock's phases on the device too, and the copies to it of the thread that makes this.

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
        """Begin with the next step; the open one may have begun earlier."""
        self._patches.replace(self._clock, "write", lambda original: self._events.write)
        self._patches.replace(self._clock, "restart", self._restarting)
        for name in copies.NAMES:
            mark = functools.partial(copies.marked, copying=self._copying, thread=get_ident())
            self._patches.replace(torch.Tensor, name, mark)
        self._events.start(device_events.events_on(self._device))

    def remove(self) -> None:
        """Mark no more."""
        self._events.stop()
        self._patches.remove()

    def apply(self, steps: list[Measurement]) -> None:
        """Let the steps have the device's times, and leave out those of which they are not known, as of the first one.

        By the host's clock that one would be the shortest: it began with an idle device and only queued its work.
        Where most are not known, all keep the host's times.

        Args:
            steps: of this clock.
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

    def _restarting(self, original: Callable[..., float]) -> Callable[..., float]:
        def restart(*, first: bool = False) -> float:
            now = original(first=first)
            self._events.write((RESUME, now))
            return now

        return restart

    def _copying(self) -> Callable[[], None] | None:
        # Without gradients it is an evaluation that copies.
        if not self._patches.on or not torch.is_grad_enabled() or not self._counts():
            return None
        before = self._clock.code
        self._clock.enter("copy")
        return functools.partial(self._clock.enter, before)
