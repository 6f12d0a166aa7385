"""What an earlier run has found: a suggestion for this one, tried first and as a whole, decided by a closing trial."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from accel.profiler.interruptions import ours
from accel.profiler.typed_json import UnreadableJson
from accel.search.plan import Choices

if TYPE_CHECKING:
    from accel.cache.remembered_plans import RememberedPlans as RememberedPlans
    from accel.search.state import Candidate

MOST_DAYS = 30
_LONGER = 1.02
"""What gave nothing is tried again once this run is so many times as long as the last one: runs of one script mostly
last about equally long, and just before the end nothing can be won."""
_DAY_S = 86400.0
_LARGEST = 1e12


@dataclass(kw_only=True)
class RememberedSearch:
    """What a search found."""

    searched: str
    """When, ISO 8601 with offset."""
    plan: Choices = field(default_factory=dict)
    """Strategy name → setting, in the order in which they are switched on."""
    speedup: float | None = None
    """Of the plan, by its last closing trial; None if there was none."""
    lost: dict[str, str] = field(default_factory=dict)
    """Strategies that gave nothing → what was measured."""
    cost_s: dict[str, float] = field(default_factory=dict)
    """Strategy → seconds that its one-off work, such as compiling, took last. The setting follows the name where each
    has work of its own."""
    run_s: float = 0.0
    """Seconds that the steps of the last run took."""

    def check(self) -> None:
        """Raise `UnreadableJson` unless each time and number is one."""
        seconds_of(self.searched)
        numbers = [self.speedup, self.run_s, *self.cost_s.values()]
        if not all(number is None or 0 <= number < _LARGEST for number in numbers):
            raise UnreadableJson(f"its numbers must lie in [0, {_LARGEST:g})")

    def says_the_same(self, other: RememberedSearch) -> bool:
        """Tell whether both say the same but for times."""
        return dataclasses.replace(self, searched="", run_s=0.0) == dataclasses.replace(other, searched="", run_s=0.0)


class RememberedPlan:
    """Use what an earlier run has found, and pass on what this one finds.

    Args:
        memory: keeps it from run to run; None remembers nothing.
    """

    what = "the remembered plan"

    def __init__(self, memory: RememberedPlans | None, now: Callable[[], float] = time.time) -> None:
        self._memory, self._now = memory, now
        self._earlier: RememberedSearch | None = None
        """What stands of the earlier run, if no check has shown otherwise."""
        self._suggestion = ""
        """What is being checked, in words."""
        self.text = ""
        self.is_checking = False
        self.cost_s: dict[str, float] = {}
        """One-off work → what it took when it was done last, in an earlier run or this one."""
        self.tried: set[str] = set()
        self.stored: RememberedSearch | None = None  # as far as it was decided in this run

    @property
    def note(self) -> str:
        """Where the result is kept, or why it is not; '' if it is not to be."""
        return "" if self._memory is None else self._memory.note

    def recall(self) -> None:
        """Look up what an earlier run under the present conditions has found."""
        if self._memory is None:
            return
        self._end_check()
        known = self.stored = self._memory.recall()
        self._earlier, self.text, self.tried = None, "", set()
        self.cost_s = {} if known is None else dict(known.cost_s)
        if known is None:
            return
        days = abs(self._now() - seconds_of(known.searched)) / _DAY_S
        old = f"it is {days:.0f} days old" if days > MOST_DAYS else ""
        if reason := self._memory.interrupted or old:
            self.text = f"from {_date(known.searched)}; {reason}, so all is searched again"
            return
        self._earlier = known
        outcome = "a plan of which nothing applies now" if known.plan else "nothing that helped"
        self.text = f"from {_date(known.searched)}: {outcome}"

    def choices(self, candidates: dict[str, Candidate]) -> Choices:
        """Return what of the earlier plan applies here.

        Only settings are taken that this version would try in this run, whatever the memory says.
        """
        if self._earlier is None:
            return {}
        plan = {n: s for n, s in self._earlier.plan.items() if n in candidates and _applies(candidates[n], s)}
        if plan:
            names = ", ".join(f"{n} {candidates[n].describe(setting)}".strip() for n, setting in plan.items())
            is_whole = len(plan) == len(self._earlier.plan)
            speedup = f" ({self._earlier.speedup:.2f}x then)" if self._earlier.speedup and is_whole else ""
            more = "" if is_whole else "; the rest of it does not apply now"
            self._suggestion = self.text = f"from {_date(self._earlier.searched)}: plan {names}{speedup}{more}"
        return plan

    @property
    def run_s(self) -> float:
        """How long the last run was; 0 if that isn't known."""
        return 0.0 if self._earlier is None else self._earlier.run_s

    @property
    def saved_s(self) -> float:
        """Seconds that the whole plan saves in a run as long as the last one; 0 if that isn't known."""
        speedup = None if self._earlier is None else self._earlier.speedup
        return 0.0 if speedup is None else self.run_s * max(0.0, speedup - 1)

    def begin_check(self, waiting: list[str]) -> None:
        """Begin the check of the plan, but for what waits for the budget."""
        assert self._memory is not None
        self._suggestion += f"; waiting for the budget: {', '.join(waiting)}" if waiting else ""
        self.is_checking, self.stored = True, None
        self.text = f"{self._suggestion}; being checked again"
        self._memory.begin_check()

    def confirm(self) -> None:
        """The plan has passed the guard and its closing trial."""
        self.is_checking = False
        self.text = f"{self._suggestion}; checked again: kept"

    def reject(self, why: str) -> None:
        """The plan did not pass: forget it, and the verdicts that were made beside it."""
        assert self._memory is not None
        self.is_checking, self._earlier, self.stored = False, None, None
        self.text = f"{self._suggestion}; checked again: undone ({why}), and searched again"
        self._memory.forget()

    def failed(self) -> None:
        """accel has failed: if it was during the check, the next run is not to try the same."""
        if self.is_checking and self._memory is not None:
            self.is_checking = False
            self._memory.forget()

    def reason(self) -> str:
        """Return why a strategy of the confirmed plan is kept."""
        assert self._earlier is not None
        return f"remembered from {_date(self._earlier.searched)}; the plan as a whole was checked again"

    def lost(self, name: str) -> str:
        """Return what became of a strategy that gave nothing in an earlier run, and was not tried since; else ''."""
        if self._earlier is None or name in self.tried or name not in self._earlier.lost:
            return ""
        days = int(max(0.0, self._now() - seconds_of(self._earlier.searched)) / _DAY_S)
        ago = "less than a day ago" if days < 1 else "a day ago" if days == 1 else f"{days} days ago"
        return f"tried {ago}: {self._earlier.lost[name]}"

    def postponed(self, name: str, elapsed_s: float) -> str:
        """Return why it is too early to try a strategy that gave nothing in an earlier run, else ''."""
        lost = self.lost(name)
        return f"{lost}; again if this run lasts longer" if lost and elapsed_s < _LONGER * self.run_s else ""

    def store(
        self,
        plan: Choices,
        lost: dict[str, str],
        undone: set[str],
        speedup: float | None,
        run_s: float,
        *,
        ended: bool,
    ) -> None:
        """Remember what is known by now.

        Args:
            lost: strategies that gave nothing in this run → what was measured.
            undone: these, and all others that have been undone in this run.
            speedup: of the plan, if its closing trial has been made.
            run_s: seconds that this run's steps have taken.
            ended: the run is over.
        """
        if self._memory is None:
            return
        if self.is_checking:  # it has shown nothing yet
            if ended:
                self._end_check()
            return
        earlier = self._earlier
        known = RememberedSearch(searched=_iso(self._now())) if earlier is None else earlier
        # What could not be tried in this run, or not be judged, is tried in the next one.
        kept = {**plan, **{n: s for n, s in known.plan.items() if n not in plan and n not in undone}}
        if kept != plan or speedup is None:
            speedup = known.speedup if kept == known.plan else None
        search = RememberedSearch(
            searched=known.searched,
            plan=kept,
            speedup=None if speedup is None else round(speedup, 4),
            lost={**{n: why for n, why in known.lost.items() if n not in self.tried}, **lost},
            cost_s={work: round(seconds, 2) for work, seconds in self.cost_s.items()},
            run_s=round(run_s if ended else max(run_s, known.run_s), 1),
        )
        if not (search.plan or search.lost or search.cost_s):
            return
        if self.stored is None or ended or not search.says_the_same(self.stored):
            self.stored = search
            self._memory.store(search)

    def _end_check(self) -> None:
        if self.is_checking and self._memory is not None and self._earlier is not None:
            self.is_checking = False
            self._memory.store(self._earlier)


def _applies(candidate: Candidate, setting: Any) -> bool:
    if candidate.ruled_out is not None or candidate.refusal():
        return False
    try:
        settings = candidate.strategy.settings(candidate.run)
        return any(type(other) is type(setting) and other == setting for other in settings)
    except ours():
        return False


def seconds_of(moment: str) -> float:
    """Return seconds since 1970 of an ISO 8601 time.

    Raises:
        UnreadableJson: if it is none.
    """
    try:
        return datetime.fromisoformat(moment).astimezone().timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise UnreadableJson(f"it must hold times as ISO 8601, got {moment[:60]!r}: {error}") from None


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


def _date(moment: str) -> str:
    return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M")
