"""How many steps the controller takes for what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How many steps the controller takes for what."""

    observe: int = 12
    """Plain steps before anything is tried."""
    guard: int = 2
    """Steps whose replays must agree before a candidate runs for real; two, so that a stale input shows."""
    watch: int = 50
    """Steps of a look at a finished plan."""
    rest: int = 150
    """Steps between two such looks, in which nothing is measured."""
    recheck: int = 250
    """Steps from the end of the search to the guard's next look; the gap then doubles."""
    crowded_waits: int = 3
    """How often the search waits for a crowded machine to become quiet, `recheck` steps each time."""
    crowded_wait_s: float = 20.0
    """The longest such wait, s: slow steps make for fewer of them."""
    urgent: float = 0.3
    """Share of the step from which on a phase is worth a trial on a crowded machine: what shortens it shows above the
    noise."""
    reopenings: int = 3
    """How often the search may begin again; a batch shape that never settles would keep it searching."""
    slower: float = 1.10
    """A plan whose step has become this much slower, three looks in a row, is tried again."""

    def crowded_rest(self, step_s: float) -> int:
        """Return the steps to wait for a quiet machine, few where they are slow."""
        return max(self.observe, min(self.recheck, int(self.crowded_wait_s / max(step_s, 1e-6))))
