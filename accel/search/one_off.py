"""One-off work: settings whose turn comes once the budget allows for it, and what is prepared beside the loop."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable
from typing import Any

from accel.profiler.interruptions import ours
from accel.search.actions import Candidate, Result


class SettingsLeft:
    """The settings of candidates that are still to be tried, where the budget did not allow for all at once."""

    def __init__(self) -> None:
        self._left: dict[str, list[Any]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def of(self, candidate: Candidate) -> list[Any]:
        """Return the settings that are left, at first all of them."""
        return self._left.get(candidate.name) or candidate.settings()

    def first(self, candidate: Candidate) -> Any:
        """Return the setting whose one-off work comes next; None for a candidate that has none."""
        try:
            return next(iter(self.of(candidate)), None) if candidate.one_off_s else None
        except ours():  # a model whose modules can't be looked into; its refusal will say so
            return None

    def keep(self, name: str, settings: list[Any]) -> None:
        """Leave these for later; [] when all have been tried."""
        self._left.pop(name, None)
        if settings:
            self._left[name] = settings

    def forget(self, name: str | None = None) -> None:
        """Begin a candidate anew, or all."""
        self._left = {} if name is None else {n: settings for n, settings in self._left.items() if n != name}


class Preparations:
    """What strategies prepare beside the loop, such as a helper process that compiles, and what it costs the steps.

    Args:
        candidates: that may prepare themselves.
    """

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        self._candidates = list(candidates)
        self._slowdowns: dict[str, list[float]] = {}

    def under_way(self, charged: Collection[str]) -> str:
        """Return the name of the candidate that does one-off work beside the loop now, else ''.

        Args:
            charged: those whose work has been counted as it began.
        """
        others = (c for c in self._candidates if c.expected_s is not None and c.name not in charged)
        return next((c.name for c in others if c.is_preparing()), "")

    def count(self, name: str, result: Result, usual_s: float) -> float:
        """Return what the steps of a result took above the usual, all in all, s.

        Args:
            name: of what was prepared meanwhile.
            result: of steps under the present plan.
            usual_s: a step's time without that.
        """
        if not result.seconds or usual_s <= 0:
            return 0.0
        slower = statistics.median(result.seconds) - usual_s
        self._slowdowns.setdefault(name, []).append(slower / usual_s)
        return max(0.0, slower) * result.steps

    def outcome(self, name: str) -> str:
        """Return what it cost, as a line for the report, and forget it; '' if nothing was counted."""
        slowdowns = self._slowdowns.pop(name, [])
        if not slowdowns:
            return ""
        longer = max(0.0, statistics.median(slowdowns))
        return f"{name} was prepared beside the loop: steps took {longer:.0%} longer meanwhile"
