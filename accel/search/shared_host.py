"""Fewer threads beside other processes: tried as soon as these keep the cores busy, and again once they have left.

Where the threads of an operator outnumber the free cores, each waits for the one that has none, however much the others
spin: on two cores beside one busy process a step of ResNet-50 took 0.30 s with two threads and 0.13 s with one. Such a
gain is far above the noise that other processes make, and gone, or a loss, as soon as they are.
"""

from __future__ import annotations

from dataclasses import replace

from accel.search.candidate_trials import CandidateTrials
from accel.search.experiments import Decisions
from accel.search.host_load import Before, HostLoad


class SharedHost(CandidateTrials):
    """Follow the load of the host; the arguments are those of `Experiments`."""

    def _follow_load(self) -> Decisions:
        """Try what uses fewer cores if other processes have come, and the plan without it if they have left."""
        load = self._neighbours.take_news()
        if load is None:
            return
        self._is_following = True
        if load.is_quiet:
            yield from self._without_neighbours()
        else:
            yield from self._beside_neighbours(load)
        self._is_following = False
        if self._quiet_plan():
            self._blocks_outcome = None  # it says nothing of these

    # -- they have come ------------------------------------------------------------------------------------------------

    def _beside_neighbours(self, load: HostLoad) -> Decisions:
        """Try at length what uses fewer cores, for it is noisy here; only a keep counts.

        Neither the budget nor an earlier verdict holds it up: the one is for gains that may not come, the other was
        found under another load. Only compiling once more for it must be affordable. Its trial begins with it: plain
        steps are slow here, and in a run that ends soon they are all that there is time for.
        """
        for candidate in self._freeing():
            name = candidate.name
            if name in self.plan or self._is_settled(name):
                continue
            self._left.forget(name)  # the settings to be tried have changed with the load
            if (one_off_s := self._one_off_s(candidate)) and not self._affordable(one_off_s):
                self._neighbours.ask_later()
                continue
            before = self._neighbours.beside[name] = Before(self.rows[name], name in self._pending)
            self._ledger.withdraw(name)
            yield from self._try(candidate, replace(self._config.early(), first="B"))
            if self._is_interrupted():
                return
            self._left.forget(name)
            if name in self.plan:
                self._keep_beside(name, load)
            elif self._is_settled(name):
                self._neighbours.undone(name)
                self._settle_beside(name)
            else:
                self._neighbours.undone(name)
                self._ledger.restore(before.row)

    def _keep_beside(self, name: str, load: HostLoad) -> None:
        row = self.rows[name]
        row.why += f", beside {load.text}"
        self._note(f"{name} {row.setting} is kept for as long as there are {load.text}")
        self._say(f"other processes keep the machine busy: {name} {row.setting} until they leave")
        self._settle_beside(name)

    def _settle_beside(self, name: str) -> None:
        self._pending = [other for other in self._pending if other != name]
        self._ledger.settle(name)

    def _is_settled(self, name: str) -> bool:
        """Tell whether it is out of the question: it is wrong, or has failed."""
        return name in self._tripped or (self.rows[name].gain is None and self.rows[name].status == "undone")

    # -- they have left ------------------------------------------------------------------------------------------------

    def _without_neighbours(self) -> Decisions:
        """Try the plan without what was kept beside them."""
        self._note("the other processes have left: the plan is tried without what was kept beside them")
        for name in list(self._neighbours.beside):
            verdict = yield from self._retry(name, if_much_slower="drop")
            if self._is_interrupted():
                return
            if name in self.plan and verdict == "keep":
                del self._neighbours.beside[name]
                self.rows[name].why += "; faster without them too"
            elif name in self.plan:
                self._neighbours.doubt_quiet()
