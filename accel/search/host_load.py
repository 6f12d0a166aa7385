"""The load of the host: what other processes leave to this run's threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from accel.report import StrategyRow

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


class Before(NamedTuple):
    """What was known of a strategy before it was tried beside other processes."""

    row: StrategyRow
    was_pending: bool
    """It was to be tried in its turn."""


class Neighbours:
    """The other processes on the host, as far as they matter: they have come, or have left."""

    def __init__(self) -> None:
        self.beside: dict[str, Before] = {}
        """What is being tried or was kept beside them, and is not known to pay without them."""
        self.are_here = False
        """By the last look."""
        self.news: HostLoad | None = None
        """The look that showed a change on which nobody has acted yet."""
        self._shared, self._quiet = 0, 0
        self._needed, self._quiet_needed = 1, 1
        self._is_answered = False

    def see(self, load: HostLoad | None) -> None:
        """Take in a look at the host, None if there was none."""
        if load is None:
            return
        self.are_here = load.is_shared
        self._shared = self._shared + 1 if load.is_shared else 0
        self._quiet = self._quiet + 1 if load.is_quiet else 0
        if load.is_quiet:
            self._is_answered = False
            self.news = load if self.beside and self._quiet >= self._quiet_needed else None
        elif self._shared >= self._needed and not self._is_answered:
            self._is_answered = True
            self.news = load

    def take_news(self) -> HostLoad | None:
        """Return the news, and forget them."""
        news, self.news = self.news, None
        return news

    def ask_later(self) -> None:
        """Act on others only after twice as many looks as before: those that come and go would cost a trial each."""
        self._needed *= 2
        self._shared = 0
        self._is_answered, self.news = False, None

    def doubt_quiet(self) -> None:
        """Try again without them only after twice as many quiet looks as before: noise has left that open."""
        self._quiet_needed *= 2
        self._quiet = 0

    def undone(self, name: str) -> Before | None:
        """Note that a strategy is no longer in the plan; return what was known before, if it was kept beside others."""
        before = self.beside.pop(name, None)
        if before is not None:
            self.ask_later()
        return before
