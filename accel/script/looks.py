"""How much it may take to get to know the models of a script, which may make ever new ones.

To find the modules of an optimizer, those that were built in the run are gone through, and if they are not among these
all objects of the process: 20 ms, or seconds beside a dataset of many small ones. To begin the search for a model takes
as long. Federated training and population loops copy a model for each of thousands of clients, which take a few steps
each.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from accel.run import ranks
from accel.search.budget import Budget

_AT_FIRST_S = 0.5
"""Seconds that may be spent before the run has lasted: on the two models of a GAN, or some short folds."""
_AT_FIRST, _UPDATES_EACH = 16, 1000
"""Looks that several ranks may take at first, and updates after which they may take one more."""


class Looks:
    """Tell whether the run has lasted long enough for another look at what an optimizer trains.

    A process alone goes by the time. Several ranks must decide alike, so they go by the number of updates.

    Args:
        budget: what a search may cost; all looks together may cost as much.
        clock: seconds, monotonic.

    Attributes:
        taken: how many looks there were.
    """

    def __init__(self, budget: Budget, clock: Callable[[], float] = time.perf_counter) -> None:
        self.taken = 0
        self._budget, self._clock = budget, clock
        self._began = clock()
        self._spent = self._latest = 0.0

    def are_affordable(self, updates: int) -> bool:
        """Return whether one may be taken now; the first may always.

        Args:
            updates: steps of all optimizers so far.
        """
        if ranks.are_several():
            return self.taken < _AT_FIRST + updates // _UPDATES_EACH
        allowed = _AT_FIRST_S + self._budget.in_all(elapsed=self._clock() - self._began)
        return not self.taken or self._spent + self._latest <= allowed

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Count a look, and the seconds of the block."""
        self.taken += 1
        self._latest = 0.0
        with self.counted():
            yield

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count the seconds of a block as a part of the latest look."""
        began = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - began
            self._latest += seconds
            self._spent += seconds
