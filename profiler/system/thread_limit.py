"""Fewer intra-op threads while other processes hold cores.

Threads that outnumber the free cores wait for each other at the end of each parallel operation, until the scheduler has
given the last of them a core: beside one busy process on two cores of a Xeon, a step of a transformer took 400 ms in
place of 14, that of a small CNN 130 in place of 9, and what held the script back in quiet was lost in that. With one
thread they took 19 and 15 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from accel.profiler.evidence import are_shared
from accel.profiler.host import CrowdMeter, free_cores, usable_cores
from accel.profiler.torch_threads import set_number

_LONG_ENOUGH_S = 0.25
"""After which a meter can tell."""
_PERHAPS = 0.1
"""Share of the cores held by others before the first steps, above which the first ones are looked at, too."""


class ThreadLimit:
    """Let torch compute with no more threads than there are cores free, on the thread that calls this.

    Attributes:
        own: the loop's number of threads, if it was limited; else None.
        threads: to which it was limited; else None.
    """

    def __init__(self, meter: CrowdMeter | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.own: int | None = None
        self.threads: int | None = None
        self._meter, self._clock = meter or CrowdMeter(), clock
        self._since = clock()
        self._looks_again = False
        """Others may have held many cores before the first steps: do they still?"""

    def begin(self) -> bool:
        """Limit the threads if need be; call it between two of the first steps.

        Returns:
            False if a next step must have passed to tell.
        """
        own, cores = torch.get_num_threads(), usable_cores()
        if own == 1:
            return True
        others = self._meter.cores()
        if others is None:  # the run is too young, or the system does not tell
            return self._clock() - self._since >= _LONG_ENOUGH_S
        self._since = self._clock()
        if not self._looks_again and others > _PERHAPS * cores:
            self._looks_again = True
            return False
        free = free_cores(cores, others)
        if are_shared(others, cores) and own > free:
            self.own, self.threads = own, free
            set_number(free)
        return True

    def restore(self) -> None:
        """Let torch compute with as many threads as the loop had, unless it has set another number meanwhile."""
        if self.own is not None and torch.get_num_threads() == self.threads:
            set_number(self.own)
