"""The load of the host: what other processes leave to this run's threads."""

from __future__ import annotations

from dataclasses import dataclass

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
