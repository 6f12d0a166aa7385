"""What keeps batches from being made ahead: a sampler or a dataset that the loop may set, and batches that differ.

Where nobody asked for batches made ahead, the first reason ends it for good, and the loop makes
the very batch itself. Where somebody did, they are made anew after a change, a few times. Some are
made by the loop too and compared bit by bit: the first one after each switch, and then as many as
take one in two hundred of the loop's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from accel.dataio.batches import equal
from accel.dataio.dataset.watch import DatasetWatch
from accel.dataio.engine.engine import BatchJob, NotAhead
from accel.dataio.fetching.fetch import fetch_of
from accel.dataio.fetching.randomness import random_state, seed_everything, states_of_their_own
from accel.dataio.passes.movable import not_read_ahead

# Times that batches made ahead are thrown away because the loop has changed the dataset meanwhile.
_MOST_RENEWALS = 3
# Of the loop's time, for comparing.
_SHARE = 0.005


class AheadCheck:
    """Look whether batches that are made ahead are those that the loop would make itself.

    Args:
        loader: whose batches they are.
        strict: nobody asked for them: raise `NotAhead` once they could be others.
        whole: also where a change of the dataset might not be seen.
        seeded: the loop itself makes a batch from its job's seed; if not, as a plain loader does.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        strict: bool,
        whole: bool = False,
        seeded: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._loader, self.strict, self._whole, self._seeded = loader, strict, whole, seeded
        self._clock = clock
        self.watch: DatasetWatch | None = None
        self._sampler_finding = ""
        self._renewals = self.seen = self.compared = 0
        self._is_due = False
        self._began, self._spent_s, self._last_s = clock(), 0.0, 0.0

    def look(self, watch: DatasetWatch | None) -> None:
        """Watch from now on what the loop changes of what fetching reads; None for nothing."""
        self.watch = watch if self._renewals <= _MOST_RENEWALS else None
        self._sampler_finding = not_read_ahead(self._loader) if self.strict else ""

    def refuse(self) -> None:
        """Raise `NotAhead` if nothing may be made ahead now."""
        if not self.strict or self.watch is None:
            return
        if self._sampler_finding:
            raise NotAhead(self._sampler_finding)
        if self._whole and self.watch.unseen:
            raise NotAhead(f"the loop could change {self.watch.unseen}, within an epoch without being seen")

    def is_stale(self, indices: Any) -> bool:
        """Return whether batches are to be made anew: the loop has changed what fetching reads for the next one."""
        if self.watch is None or not self.watch.changed(indices):
            return False
        if self.strict:
            raise NotAhead(f"the loop changes {self.watch.change} within an epoch")
        self._renewals += 1
        return self._renewals <= _MOST_RENEWALS

    def switched(self) -> None:
        """Compare the next batch: it is the first one after a switch."""
        self._is_due = True

    def compare(self, job: BatchJob, batch: Any) -> None:
        """Raise `NotAhead` if a batch is not the loop's own; now and then it is looked at."""
        if not self.strict or self.watch is None:
            return
        self.seen += 1
        now = self._clock()
        if not self._is_due and self._spent_s + self._last_s > _SHARE * (now - self._began):
            return
        fetch = fetch_of(self._loader).of(self._loader.dataset)  # past what a cache knows
        with states_of_their_own():
            if is_seeded := self._seeded and job.seed is not None:
                seed_everything(job.seed)
            before = random_state()
            own = fetch(job.indices)
            draws = random_state() != before
        if not equal(own, batch):
            raise NotAhead("a batch was compared with the loop's own, and is another one")
        if draws and not is_seeded:
            raise NotAhead("fetching a sample draws random numbers")
        self.compared += 1
        self._is_due, self._last_s = False, self._clock() - now
        self._spent_s += self._last_s
