"""Steps as the device takes them: the phases of a few steps by its own clock.

The host runs ahead of a GPU until it has to wait for it, which most loops do where they copy their next batch: by the
host's clock two thirds of a BERT's step were in that line. By the device's, each phase has what the device did in it or
waited for.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch

from accel.profiler.clocks.device_events import CudaEvent, DeviceEvents
from accel.profiler.clocks.probes import Function, Patches
from accel.profiler.phases import CUT, PHASES, Measurement, StepClock

log = logging.getLogger("accel")


class DeviceSteps:
    """Mark a clock's phases on the device too, and the copies to it of the thread that makes this.

    Args:
        clock: whose marks are followed.
        number: tells the number of the step that ends.
        device: where the model is.
        make: makes an event, as for `DeviceEvents`; default one on that device's current stream.
    """

    def __init__(
        self,
        clock: StepClock,
        number: Callable[[], int],
        device: torch.device,
        make: Callable[[], Any] | None = None,
    ) -> None:
        self._clock, self._number = clock, number
        self._thread = get_ident()
        self._numbers: list[int] = []
        self._steps: list[dict[str, float] | None] = []
        self._patches = Patches()
        self._events = DeviceEvents(clock.write, make or functools.partial(CudaEvent, device), self._steps.append)

    def install(self) -> None:
        """Begin with the step that is open."""
        self._write, self._clock.write = self._clock.write, self._marked
        self._events.on = True
        for name in ("to", "cuda"):
            self._patches.replace(torch.Tensor, name, self._copying)

    def remove(self) -> None:
        """Mark no more."""
        self._patches.remove()
        self._clock.write = self._write

    def apply(self, steps: Sequence[Measurement]) -> None:
        """Let steps that the device has done have its times; the first one seen, and an epoch's, keep the host's.

        Args:
            steps: of this clock.
        """
        if not self._events.on:
            return
        self._events.finish()
        # The first may have begun earlier; the first of an epoch holds what was done between two of them.
        times = dict(zip(self._numbers[1:], self._steps[1:], strict=True))
        for step in steps:
            took = times.get(step.step)
            if took and not step.first:
                step.phases = {phase: took.get(phase, 0.0) / 1e3 for phase in PHASES}
                step.seconds = sum(step.phases.values())

    def _marked(self, pair: Any) -> None:
        if pair is CUT:
            self._numbers.append(self._number())
        try:
            self._events.write(pair)
        except Exception:  # the host's times are left, and the loop goes on
            self._events.on = False
            log.debug("no events on the device", exc_info=True)

    def _copying(self, original: Function) -> Function:
        @functools.wraps(original)
        def choosing(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.is_cuda or self._thread != get_ident():
                return original(tensor, *args, **kwargs)
            before = self._clock.code
            self._clock.enter("copy")
            try:
                return original(tensor, *args, **kwargs)
            finally:
                self._clock.enter(before)

        return choosing
