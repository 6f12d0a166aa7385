"""The switchboard: which strategies are on, and the one place where they are switched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from accel.profiler.interruptions import Tolerated, ours
from accel.run.context import Run
from accel.run.ranks import Ranks
from accel.search.plan import Choices
from accel.strategies.base import Exactness, NothingHelps, Strategy, designed, is_collective

log = logging.getLogger("accel")

# What a strategy must touch to make an output or a gradient wrong.
_SUSPECT = {"model", "optimizer"}


class Switchboard:
    """Switch strategies on and off, between two steps; one that fails is dropped and reported.

    Args:
        run: what strategies act on.
        strategies: by name, in registry order.
        suspected: called when a strategy is switched on that could make an output or a gradient wrong.
        tripped: called when strategies were switched off in the middle of an action.
    """

    def __init__(
        self,
        run: Run,
        strategies: dict[str, Strategy],
        *,
        suspected: Callable[[], None],
        tripped: Callable[[], None],
    ) -> None:
        self._run = run
        self.strategies = strategies
        self._suspected, self._tripped = suspected, tripped
        self.active: Choices = {}
        self.trips: dict[str, str] = {}
        """Strategy → why it was switched off, since the last action began."""

    def switch(self, plan: Choices) -> None:
        """Switch strategies off and on until `plan` is what is on."""
        for name in reversed([n for n, setting in self.active.items() if n not in plan or plan[n] != setting]):
            self._off(name)
        for name, setting in plan.items():
            if name not in self.active and name not in self.trips:
                self._on(name, setting)

    def switch_together(self, plan: Choices, ranks: Ranks) -> None:
        """Switch; a strategy goes off again if it failed on one of the ranks: all of them have it on, or none."""
        new = [n for n in plan if self.active.get(n, self) != plan[n]]
        self.switch(plan)
        if not new:
            return
        mine = {name: self.trips.get(name, "") for name in new if name not in self.active}
        missed = f"did not switch {', '.join(new)} on"
        for name, why in ranks.decide(mine, _failed_somewhere, missed).items():
            if name in self.active:
                self._off(name)
                self.trips[name] = why

    def _on(self, name: str, setting: Any) -> None:
        self.active[name] = setting  # first: what Ctrl-C leaves half on is switched off like what is on
        try:
            self.strategies[name].enable(self._run, setting)
        except ours() as error:
            self.active.pop(name, None)
            failed = f"it could not be switched on: {type(error).__name__}: {error}"
            self.trips[name] = str(error) if isinstance(error, NothingHelps) else failed
            with Tolerated(f"{name} could not be switched off"):
                self.strategies[name].disable(self._run)
            return
        if self.strategies[name].touches & _SUSPECT:
            self._suspected()

    def _off(self, name: str) -> None:
        try:
            self.strategies[name].disable(self._run)
        except ours() as error:
            self.trips[name] = f"it could not be switched off: {type(error).__name__}: {error}"
        self.active.pop(name, None)  # last, for the same reason

    def take_trips(self) -> dict[str, str]:
        """Return the trips, and clear them; a strategy that has stopped acting by itself has tripped, too."""
        for name in list(self.active):
            if why := self.strategies[name].failure(self._run):
                self._off(name)
                self.trips[name] = why
        trips, self.trips = self.trips, {}
        return trips

    def trip(self, why: str, *culprits: str) -> None:
        """Switch off, now, every strategy that acts on the model or its update; the controller is informed later.

        Only the culprits are given up, the one that was switched on last where none is known; the others come back with
        the next action.

        With several ranks what they must switch off together stays on until the controller is.
        """
        suspects = [name for name in self.suspects() if name not in self.trips]
        blamed = [name for name in suspects if name in culprits] or suspects[-1:]
        for name in reversed(suspects):
            if self._run.world_size == 1 or not is_collective(self.strategies[name]):
                self._off(name)
        self._tripped()
        for name in blamed:
            self.trips[name] = why
        log.warning("accel: %s was switched off: %s", ", ".join(blamed), why)

    def drop_fetching(self, why: str, *, for_good: bool = False) -> None:
        """Switch off what acts on the loader; `for_good` to release what it has made, too."""
        on_fetching = [name for name, strategy in self.strategies.items() if strategy.touches == {"input"}]
        for name in [name for name in self.active if name in on_fetching]:
            self._off(name)
            self.trips[name] = why
        self._tripped()
        self.close(on_fetching if for_good else ())

    def suspects(self) -> list[str]:
        """Return the strategies that are on and could make an output or a gradient wrong."""
        return [name for name in self.active if self.strategies[name].touches & _SUSPECT]

    def new_in(self, plan: Choices) -> list[str]:
        """Return the strategies of a plan that are not on with its settings; all of them if the whole plan is on."""
        return [n for n, setting in plan.items() if n not in self.active or self.active[n] != setting] or list(plan)

    def acting_on(self, what: str, plan: Choices) -> Choices:
        """Return the part of a plan that touches `model`, `optimizer` or `input`."""
        return {name: setting for name, setting in plan.items() if what in self.strategies[name].touches}

    def exactness(self, plan: Iterable[str]) -> Exactness:
        """Return how far a plan may move the numbers."""
        return max((self.strategies[name].exactness for name in plan), default=Exactness.EXACT)

    def collective(self) -> Choices:
        """Return what is on, and no rank may switch off alone."""
        return {name: setting for name, setting in self.active.items() if is_collective(self.strategies[name])}

    def idle(self) -> list[str]:
        """Return the strategies that are off, and prepare nothing."""
        off = [name for name in self.strategies if name not in self.active]
        return [name for name in off if not designed(self.strategies[name], self._run).is_preparing]

    def close(self, names: Iterable[str]) -> None:
        """Release what these strategies, which are off, have made."""
        for name in names:
            with Tolerated(f"{name} could not be closed"):
                self.strategies[name].close(self._run)


def _failed_somewhere(trips_by_rank: list[dict[str, str]]) -> dict[str, str]:
    """Return each strategy that a rank could not switch on, with the reason from the lowest such rank."""
    return {name: why for trips in reversed(trips_by_rank) for name, why in trips.items()}
