"""Try several settings on the running loop, in rounds: a block of batches of each, there and back again.

A round puts the blocks of all settings side by side, so that what drifts meanwhile (a crowd that
comes and goes, a clock that slows down) touches all alike: settings are compared within rounds, by
the mean of log ratios. What is surely slower leaves early. It ends when the setting to be taken is
surely not slower than any other by more than `_REGRET`: on a quiet machine after three rounds, on a
crowded one after as many as that needs, at most `_MOST`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from accel.profiler.trial import interval, log_ratios

# The first one, in the order of preference, that is slower than the fastest by no more than this is taken.
_SIMPLER = math.log(1.03)
_REGRET = math.log(1.05)
# So much slower in a first block, and in each of two blocks: not tried again.
_FAR = math.log(3.0)
_SLOWER = math.log(1.6)
_LEVEL = 0.05
_LEAST, _MOST = 3, 24


class Setting(NamedTuple):
    """An engine and its number of workers."""

    mode: str
    workers: int = 1

    def __str__(self) -> str:
        return self.mode if self.mode == "inline" else f"{self.mode}({self.workers})"


INLINE = Setting("inline")


@dataclass
class Tried:
    """The measurements of a setting."""

    setting: Setting
    step_s: list[float] = field(default_factory=list)
    """Of each block: seconds of the loop per batch."""
    wait_s: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def score(self) -> float:
        """Seconds of the loop per batch; infinite if it failed or was not measured."""
        return statistics.median(self.step_s) if self.step_s and not self.failure else math.inf


class Rounds:
    """Settings on trial.

    Args:
        tried: what is to be tried, the one to be preferred first.

    Example:
        >>> rounds = Rounds([Tried(Setting("inline")), Tried(Setting("fork", 2))])
        >>> while rounds.current is not None:
        ...     rounds.record(0.003 if rounds.current.setting.mode == "inline" else 0.002, 0.001)
        >>> str(rounds.best.setting), rounds.done
        ('fork(2)', 3)
    """

    def __init__(self, tried: Iterable[Tried]) -> None:
        self._left = list(tried)
        self._to_come = list(self._left)
        self.done = 0
        """Rounds that are over."""

    @property
    def current(self) -> Tried | None:
        return self._to_come[0] if self._to_come else None

    @property
    def best(self) -> Tried | None:
        """The one to be taken, as far as is known; None when none is left."""
        if not self.done or not self._left:
            return self._left[0] if self._left else None
        fastest = min(self._left, key=lambda each: statistics.fmean(self._against(each, self._left[0])))
        return next(each for each in self._left if statistics.fmean(self._against(each, fastest)) <= _SIMPLER)

    def record(self, step_s: float, wait_s: float) -> None:
        """Record a block of the current setting: seconds of the loop per batch, and those that it waited."""
        tried = self._to_come.pop(0)
        tried.step_s.append(max(step_s, 1e-9))
        tried.wait_s.append(wait_s)
        self._end_round()

    def drop(self, settings: Iterable[Tried]) -> None:
        gone = {id(each) for each in settings}
        self._left = [each for each in self._left if id(each) not in gone]
        if any(id(each) in gone for each in self._to_come):
            self._to_come = [each for each in self._to_come if id(each) not in gone]
            self._end_round()

    def _end_round(self) -> None:
        if self._to_come or not self._left:
            return
        self.done += 1
        best = self.best
        assert best is not None
        place = self._left.index(best)
        before, after = self._left[:place], self._left[place + 1 :]
        before = [each for each in before if not self._slow(each, best)]
        self._left = [*before, best, *(each for each in after if not self._no_faster(each, best))]
        if self.done < _MOST and len(self._left) > 1 and not self._settled(best):
            self._to_come = self._left[::-1] if self.done % 2 else self._left[:]

    def _against(self, tried: Tried, other: Tried) -> list[float]:
        """Return by how much `tried` was slower than `other`, round by round: logarithms."""
        return log_ratios(tried.step_s[: self.done], other.step_s[: self.done])

    def _slow(self, tried: Tried, best: Tried) -> bool:
        """Return whether `tried` is surely too slow to be preferred."""
        slower = self._against(tried, best)
        if self.done < _LEAST:
            return min(slower) > (_FAR if self.done == 1 else _SLOWER)
        return interval(slower, _LEVEL)[0] > _REGRET

    def _no_faster(self, tried: Tried, best: Tried) -> bool:
        """Return whether `tried`, which comes after `best`, is surely not so much faster that it would be taken."""
        if self._slow(tried, best):
            return True
        return self.done > 1 and interval(self._against(best, tried), _LEVEL)[1] < _SIMPLER

    def _settled(self, best: Tried) -> bool:
        others = [each for each in self._left if each is not best]
        return self.done >= _LEAST and all(interval(self._against(best, each), _LEVEL)[1] < _REGRET for each in others)
