"""The ledger: what was decided about each candidate, and which decisions have been announced."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence

from accel.guard.guard import Comparison
from accel.profiler.interruptions import ours
from accel.profiler.trial import Outcome
from accel.report import Event, Status, StrategyRow
from accel.search.actions import Candidate
from accel.search.plan import Choices
from accel.strategies.base import asked

SAVES_NO_FAULTS = "it saves no page faults as things are, so that what it gives can't be seen"


class Ledger:
    """Keep the report's rows and events.

    Args:
        candidates: what may be tried, in registry order.
        announce: called with each decided row, its number among those to be tried (0 for one that is announced again or
            is not to be tried), and their total.
        drop_gain: the gain below which a candidate is not worth keeping.
    """

    def __init__(
        self, candidates: Sequence[Candidate], announce: Callable[[StrategyRow, int, int], None], drop_gain: float
    ) -> None:
        self._candidates = {candidate.name: candidate for candidate in candidates}
        self._announce, self._drop_gain = announce, drop_gain
        self.rows = {candidate.name: _row(candidate) for candidate in candidates}
        self.events: list[Event] = []
        self.moving = False
        """The regime is changing: a first decision is not announced, since it is made again under the new one."""
        self._announced: dict[str, tuple[str, str, str]] = {}
        self._counted: dict[str, bool] = {}
        """Strategies not announced yet → whether they count, in this turn: asking all of them at each announcement took
        0.3 s of a run on a GPU."""
        self._other_draws: dict[str, bool] = {}

    @property
    def has_announced(self) -> bool:
        """True if a decision has been announced since the search began."""
        return bool(self._announced)

    def begin_turn(self) -> None:
        """Forget what holds between two actions only."""
        self._counted.clear()

    def note(self, step: int, text: str) -> None:
        """Record an event."""
        self.events.append(Event(step=step, text=text))

    def decide(self, name: str, status: Status, why: str) -> None:
        """Record a decision, and announce it."""
        row = self.rows[name]
        row.status, row.why = status, why
        self.announce(name)

    def announce(self, name: str) -> None:
        """Announce a row, unless it was announced as it is now."""
        row = self.rows[name]
        news = (row.status, row.setting, row.why)
        if self._announced.get(name) == news:
            return
        first = name not in self._announced
        if first and self.moving:
            return
        self._announced[name] = news
        numbered = [other for other in self._candidates if self._has_number(other)]
        done = sum(other in self._announced for other in numbered) if first and name in numbered else 0
        self._announce(row, done, len(numbered))

    def _has_number(self, name: str) -> bool:
        """Return whether a strategy is counted as one to be tried: not if it is ruled out or doesn't apply."""
        candidate = self._candidates[name]
        if candidate.ruled_out is not None:
            return False
        announced = self._announced.get(name)
        if announced:
            return announced[0] != "not applicable"
        if name not in self._counted:
            self._counted[name] = not refusal(candidate)
        return self._counted[name]

    def compared(self, name: str, finding: Comparison) -> None:
        """Record the deviation from the plain path that the guard measured."""
        row = self.rows[name]
        row.output_error, row.gradient_error = _json(finding.output_error), _json(finding.gradient_error)
        row.tolerance = finding.tolerance
        self._other_draws[name] = finding.other_draws

    def judge(self, candidate: Candidate, setting: object, outcome: Outcome, plan: Choices) -> None:
        """Record a trial's outcome in the row: the report shows the best setting.

        Args:
            candidate: what was tried.
            setting: the setting it was tried with.
            outcome: the trial's outcome.
            plan: the plan after it.
        """
        row = self.rows[candidate.name]
        if outcome.verdict == "keep":
            first = 1.0 if row.status != "kept" else None
            row.before_ms = outcome.before_ms if first else row.before_ms
            row.gain = outcome.gain * (first or row.gain or 1.0)
            row.gain_low = outcome.low * (first or row.gain_low or 1.0)
            row.gain_high = outcome.high * (first or row.gain_high or 1.0)
            assert row.before_ms is not None
            row.after_ms = row.before_ms / row.gain  # of several settings, the product of their trials
            row.spread_ms = outcome.spread_ms * row.after_ms / outcome.after_ms
            row.status = "kept"
            how = f"faster in {outcome.pairs} pairs of interleaved blocks"
            if not outcome.in_turns:
                how = "faster than the steps before it"
            if outcome.saved_faults and outcome.low <= 1:
                how = (
                    f"looks faster than the steps without it, and saves {outcome.saved_faults:,.0f} page faults in each"
                )
            if outcome.lasts:
                how += "; its effect outlasts it, so that turns would compare nothing"
            row.why = self._with_draws(candidate.name, how)
        elif row.status != "kept" and (row.gain is None or outcome.gain > row.gain):
            row.before_ms, row.after_ms, row.spread_ms = outcome.before_ms, outcome.after_ms, outcome.spread_ms
            row.gain, row.gain_low, row.gain_high = outcome.gain, outcome.low, outcome.high
            row.status, row.why = _why_not(outcome, self._drop_gain)
            row.setting = candidate.describe(setting)
        if row.status == "kept":
            row.setting = candidate.describe(plan[candidate.name])

    def _with_draws(self, name: str, why: str) -> str:
        return why + ("; dropout draws other numbers, as with another seed" if self._other_draws.get(name) else "")

    def take_over(self, name: str, why: str) -> None:
        """Record that a strategy is kept for a reason other than a trial of its own, and announce it."""
        self.decide(name, "kept", self._with_draws(name, why))

    def shown(self, names: Collection[str]) -> tuple[float, float] | None:
        """Return the gain of several kept strategies by their trials, and its lower end; None if one has none."""
        rows = [self.rows[name] for name in names]
        gains = [(row.gain, row.gain_low) for row in rows if row.gain and row.gain_low and row.status == "kept"]
        if len(gains) < len(rows):
            return None
        gain = math.prod(gain for gain, _ in gains)
        return gain, gain * math.exp(-math.hypot(*(math.log(gain / low) for gain, low in gains)))

    def is_open(self, name: str) -> bool:
        """Return whether noise may have hidden a gain: no verdict, or a drop whose interval reaches far above 1."""
        row = self.rows[name]
        if row.status == "undone" and row.gain_high is not None:
            return row.gain_high > _highest_of_small(self._drop_gain)
        return row.status == "refused"

    def settle(self, name: str) -> None:
        """Announce the result of a candidate whose settings have all been tried."""
        row = self.rows[name]
        if row.status == "not tried" and not row.why:
            row.why = f"the search was interrupted before a verdict, after {row.steps} steps"
        self.announce(name)

    def withdraw(self, name: str) -> None:
        """Withdraw a verdict; its cost still counts, and what the guard found stands."""
        row = self.rows[name]
        self.rows[name] = dataclasses.replace(
            _row(self._candidates[name]),
            cost_s=row.cost_s,
            steps=row.steps,
            output_error=row.output_error,
            gradient_error=row.gradient_error,
            tolerance=row.tolerance,
        )

    def restore(self, earlier: StrategyRow) -> None:
        """Let an earlier verdict stand again; what has been spent since counts."""
        row = self.rows[earlier.name]
        self.rows[earlier.name] = dataclasses.replace(earlier, cost_s=row.cost_s, steps=row.steps)

    def begin_anew(self) -> None:
        """Withdraw all verdicts."""
        self._announced = {}
        for name, candidate in self._candidates.items():
            if candidate.ruled_out is None:
                self.rows[name] = _row(candidate)


def refusal(candidate: Candidate) -> str:
    """Return why a candidate does not apply; '' if it does."""
    return asked(candidate.refusal)


def waiting_for(candidate: Candidate) -> str:
    """Return what a candidate waits for before it can be tried; '' if it can."""
    try:
        return candidate.waits()
    except ours() as error:
        return f"its preparation failed: {type(error).__name__}: {error}"


def _row(candidate: Candidate) -> StrategyRow:
    row = StrategyRow(
        name=candidate.name,
        summary=candidate.summary,
        treats=sorted(b.value for b in candidate.treats),
        exactness=candidate.exactness.word,
    )
    if candidate.ruled_out is not None:
        row.status, row.why = candidate.ruled_out  # type: ignore[assignment]
    return row


def _highest_of_small(drop_gain: float) -> float:
    """Return up to where the interval of a gain may reach that is too small to keep."""
    return 1 + 2 * drop_gain


def _why_not(outcome: Outcome, drop_gain: float) -> tuple[Status, str]:
    if outcome.verdict == "refused" and outcome.saved_faults == 0:
        return "refused", f"{SAVES_NO_FAULTS}; left off"
    if outcome.verdict == "refused":
        return "refused", f"too noisy to tell after {outcome.pairs} pairs of blocks; left off"
    if outcome.high < 1:
        return "undone", "slower"
    if outcome.high <= _highest_of_small(drop_gain):
        return "undone", f"gives less than {drop_gain:.0%}"
    return "undone", f"looks {'slower' if outcome.gain < 1 else 'no faster'} on a noisy machine"


def _json(value: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return value if value == value and abs(value) != float("inf") else None
