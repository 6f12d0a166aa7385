"""Fewer threads beside other processes: tried as soon as these keep the cores busy, and again once they have left.

Where the threads of an operator outnumber the free cores, each waits for the one that has none, however much the others
spin: on two cores beside one busy process a step of ResNet-50 took 0.30 s with two threads and 0.13 s with one. Such a
gain is far above the noise that other processes make, and gone, or a loss, as soon as they are.
"""

from __future__ import annotations

from accel.search.candidate_trials import CandidateTrials
from accel.search.experiments import Decisions
from accel.search.host_load import HostLoad


class SharedHost(CandidateTrials):
    """Follow the load of the host; the arguments are those of `Experiments`."""

    def _follow_load(self) -> Decisions:
        """Try what uses fewer cores if other processes have come, and the plan without it if they have left."""
        load = self._neighbours.take_news()
        if load is None:
            return
        if load.is_quiet:
            yield from self._without_neighbours()
        else:
            yield from self._beside_neighbours(load)

    def _without_neighbours(self) -> Decisions:
        names = sorted(self._neighbours.beside)
        self._neighbours.beside.clear()
        self._note("the other processes have left: the plan is tried without what was kept beside them")
        yield from self._retry_kept(names, if_much_slower="drop")
        if any(name not in self.plan for name in names):
            self._neighbours.ask_later()

    def _beside_neighbours(self, load: HostLoad) -> Decisions:
        """Try at length what uses fewer cores, for it is noisy here; only a keep counts.

        Neither the budget nor an earlier verdict holds it up: the one is for gains that may not come, the other was
        found under another load.
        """
        for candidate in self._freeing():
            name = candidate.name
            if name in self.plan:
                self._neighbours.beside.add(name)
                continue
            yield from self._try(candidate, self._config.early())
            if self._is_interrupted():
                return
            self._left.forget(name)
            row = self.rows[name]
            if row.status == "kept":
                self._neighbours.beside.add(name)
                row.why += f", beside {load.text}"
                self._note(f"{name} {row.setting} is kept for as long as there are {load.text}")
                self._say(f"{load.text}: {name} {row.setting} until they leave ({row.gain:.2f}x)")
            if row.status == "kept" or row.gain is None:  # kept, or wrong or failing
                self._pending = [other for other in self._pending if other != name]
                self._ledger.settle(name)
            else:
                if self._ledger.is_open(name):
                    self._neighbours.ask_later()
                self._ledger.withdraw(name)
