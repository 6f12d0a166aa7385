"""The controller's step counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from accel.run.host_load import SHORTEST_LOOK_S, HostLoad

_FEWEST = 5
"""Steps that an action measures at the least."""
_LOOKING = 0.005
"""Share of the time that looks at the host may take."""


_IDLE = 10
"""Times the usual rest, while nothing is on or waits: steps may be longer by then."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The controller's step counts."""

    observe: int = 12
    """Plain steps before anything is tried."""
    guard: int = 2
    """Steps whose replays must agree before a candidate runs for real; two, so that a stale input shows."""
    hold: int = 50
    """Steps in which a finished plan is measured at a time."""
    rest: int = 150
    """Steps between two such measurements, in which nothing is measured."""
    recheck: int = 250
    """Steps from the end of the search to the guard's next check; the interval then doubles."""
    crowded_looks: int = 3
    """How often the search waits for a crowded machine to become quiet, `recheck` steps each time."""
    crowded_wait_s: float = 20.0
    """The longest such wait, s: with slow steps the wait has fewer of them."""
    urgent: float = 0.3
    """Share of the step from which a phase is worth a trial even on a crowded machine: the gain stands out from the
    noise."""
    patience: int = 250
    """Steps that the search waits for the budget before it ends; what waits for longer is tried later."""
    confirm: int = 2
    """Further batches with which the guard's later check must fail before the plan is undone: of a small network near
    its end, gradients in bfloat16 were 1.3 % too long or too short (standard deviation), with no direction."""
    reopenings: int = 3
    """How often the search may begin again; a batch shape that never settles would keep it searching."""
    look_s: float = 5.0
    """From one look at the host's load to the next, s, where that matters."""
    slower: float = 1.10
    """A plan whose step has become this much slower, three medians in a row, is tried again."""

    def until_look(self, load: HostLoad | None) -> float:
        """Return how long after a look at the host the next one is due, s; soon if it could not be told."""
        return SHORTEST_LOOK_S if load is None else max(self.look_s, load.took_s / _LOOKING)

    def hold_steps(self, step_s: float, steps: int) -> tuple[int, int]:
        """Return the steps to measure, and those of the rest before them, so that the next look is in time.

        Args:
            steps: to measure otherwise.
        """
        most = math.ceil(self.look_s / max(step_s, 1e-6))
        steps = min(steps, max(_FEWEST, most))
        return steps, max(0, most - steps)

    def idle_rest(self, step_s: float) -> int:
        """Return the steps between two measurements while nothing is on or waits: only another loop is looked for.

        Args:
            step_s: what a step takes, s. Of a short one a measurement is a large part: 50 µs.
        """
        return max(self.rest, min(math.ceil(self.look_s / max(step_s, 1e-6)), _IDLE * self.rest))

    def crowded_rest(self, step_s: float) -> int:
        """Return the steps to wait for a quiet machine, few where they are slow."""
        return max(self.observe, min(self.recheck, int(self.crowded_wait_s / max(step_s, 1e-6))))
