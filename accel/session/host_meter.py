"""The host's load between two looks of the controller."""

from __future__ import annotations

import os
import time

from accel.profiler.host import CrowdMeter
from accel.run.context import Run
from accel.search.host_load import HostLoad

_APART_S = 5.0
"""From one look to the next: what others do for less than that is no reason to change the plan."""
_PRICE = 200.0
"""How many times as long as a look, which reads of every process on the host, the loop must run before the next."""


class HostMeter:
    """Measure what other processes do.

    Args:
        run: the user's objects; what is seen is noted there too.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._meter: CrowdMeter | None = None
        self._next_s = 0.0

    def begin(self, wanted: bool) -> None:
        """Begin to measure at the first action that wants it."""
        if wanted and self._meter is None:
            self._meter = CrowdMeter(launched=self._run.world_size > 1)

    def look(self, wanted: bool) -> HostLoad | None:
        """Return the load since the last look; None if it is not wanted, not known, or that was just now."""
        began_s = time.monotonic()
        if not wanted or self._meter is None or began_s < self._next_s:
            return None
        foreign_cores = self._meter.cores()
        if foreign_cores is None:
            return None
        now_s = time.monotonic()
        self._next_s = now_s + max(_APART_S, _PRICE * (now_s - began_s))
        self._run.observed.foreign_cores = foreign_cores
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self._run.world_size > 1 else 1
        return HostLoad(foreign_cores=foreign_cores, cores=self._run.cores, threads=ranks * self._run.threads)
