"""The load of the host: what other processes leave to this run's threads."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel.profiler.host import CrowdMeter, free_cores

if TYPE_CHECKING:
    from accel.run.context import Run

SHORTEST_LOOK_S = 1.0
"""Over less than that, what others do says nothing, s."""
_SHARED, _QUIET = 0.25, 0.15
"""Share of the cores that others keep busy, from which on they are in the way, and up to which they are not. Of two
cores, one spinning process beside two spinning threads gets two thirds of one."""


@dataclass(frozen=True, kw_only=True)
class HostLoad:
    """A look at the other processes on the cores of this run."""

    foreign_cores: float
    """Cores that they kept busy, on average since the look before."""
    cores: int
    """Cores that this run may use."""
    threads: int
    """Threads that its operators use in the plain loop, of all ranks on this host."""
    took_s: float = 0.0
    """What the look took, s: it reads of every process on the host."""

    @property
    def is_shared(self) -> bool:
        """Tell whether the threads of an operator must wait for cores, and so for each other."""
        return self.foreign_cores > _SHARED * self.cores and self.threads + self.foreign_cores > self.cores

    @property
    def is_quiet(self) -> bool:
        """Tell whether next to nothing else runs. Between the two nothing is certain, and nothing is done."""
        return self.foreign_cores < _QUIET * self.cores

    @property
    def text(self) -> str:
        """Say how busy they are."""
        return f"other processes that keep {self.foreign_cores:.1f} of {self.cores} cores busy"


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
        run, ranks = self._run, self._run.ranks_here
        run.observed.free_cores = max(1, free_cores(run.cores, foreign_cores) // ranks)
        return HostLoad(
            foreign_cores=foreign_cores,
            cores=run.cores,
            threads=ranks * run.threads,
            took_s=time.monotonic() - began_s,
        )
