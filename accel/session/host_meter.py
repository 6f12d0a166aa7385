"""The host's load between two looks of the controller."""

from __future__ import annotations

import os
import time

from accel.profiler.host import CrowdMeter, free_cores
from accel.run.context import Run
from accel.run.host_load import SHORTEST_LOOK_S, HostLoad


class HostMeter:
    """Measure what other processes do.

    Args:
        run: the user's objects; how many cores are left is noted there too.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._meter: CrowdMeter | None = None
        self._began_s = 0.0

    def begin(self, wanted: bool) -> None:
        """Begin to measure at the first action that wants it."""
        if wanted and self._meter is None:
            self._meter = CrowdMeter(launched=self._run.world_size > 1)
            self._began_s = time.monotonic()

    def look(self, wanted: bool) -> HostLoad | None:
        """Return the load since the last look; None if it is not wanted, not known, or that was just now."""
        began_s = time.monotonic()
        if not wanted or self._meter is None or began_s - self._began_s < SHORTEST_LOOK_S:
            return None
        self._began_s = began_s
        foreign_cores = self._meter.cores()
        if foreign_cores is None:
            return None
        run, ranks = self._run, self._ranks_here()
        run.observed.free_cores = max(1, free_cores(run.cores, foreign_cores) // ranks)
        return HostLoad(
            foreign_cores=foreign_cores,
            cores=run.cores,
            threads=ranks * run.threads,
            took_s=time.monotonic() - began_s,
        )

    def _ranks_here(self) -> int:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) if self._run.world_size > 1 else 1
