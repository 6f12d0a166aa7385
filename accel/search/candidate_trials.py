"""The trial of one candidate: each of its settings against the plan so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import replace

from accel.profiler.trial import Outcome, TrialConfig, Verdict
from accel.search.actions import Action, Candidate, Result
from accel.search.experiments import Decisions
from accel.search.later_checks import LaterChecks
from accel.search.ledger import waiting_for
from accel.search.plan import Choices

COMPARING = "comparing it with the plain loop"
"""Work that a trial is too dear for the budget by."""

_SOON_STEADY = 2
"""What needs more settling steps may need a few more the first time: its first steps say little."""


class CandidateTrials(LaterChecks):
    """Try candidates; the arguments are those of `Experiments`."""

    _postponed: set[str]
    """Pending candidates whose brief trial had no verdict."""

    @property
    def _brief(self) -> TrialConfig | None:
        """The statistics of a first trial; None if there is only one."""
        return self._config.brief()

    def _try(self, candidate: Candidate, config: TrialConfig, *, limited: bool = False) -> Decisions:
        """Try each setting of a candidate against the plan so far; a setting that wins becomes part of the plan.

        Args:
            candidate: to be tried.
            config: the statistics of its trials.
            limited: a trial is cut short, and its setting left for later, once it has cost what is left of the budget.
        """
        name, row, began_s = candidate.name, self.rows[candidate.name], self.elapsed_s
        settings = self._left.of(candidate)
        self._left.forget(name)
        for number, setting in enumerate(settings):
            one_off_s = self.recollection.one_off_s(candidate, setting)
            expected_s = one_off_s + self._recompiling_s(candidate, setting) + self._expected_check_s(candidate)
            if number and (not self._affordable(expected_s) or (one_off_s and waiting_for(candidate))):
                self._left.keep(name, settings[number:])  # they wait for their turn; the verdict so far stands
                break
            row.setting = row.setting or candidate.describe(setting)
            cost, steps = self.cost_s, self.steps
            outcome = None
            trial_plan, passed = yield from self._guarded(candidate, setting)
            if candidate.is_compared:
                self._note_work(candidate, setting, self.cost_s - cost)
            if passed:
                self._passed[name] = trial_plan
                settle = candidate.settling(setting)
                hasty = self._if_much_slower(name, config) if settle <= _SOON_STEADY else None
                limit_s = self._limit() if limited else lambda: math.inf
                outcome = yield from self._trial(self.plan, trial_plan, settle, config, hasty, limit_s)
            if not candidate.is_compared:  # then it works when it is switched on
                self._note_work(candidate, setting, self.cost_s - cost)
            row.cost_s += self.cost_s - cost
            row.steps += self.steps - steps
            self.search_steps += self.steps - steps
            if outcome is None and passed and self._cut_short_s is not None:
                self._left.keep(name, settings[number:] if number else settings)  # a list that may still grow
                why = "other processes came or left in its trial; tried later"
                if self._neighbours.news is None:
                    self._next_trial_s[name] = 2 * self._cut_short_s
                    why = self._budget.too_dear(self.cost_s, self._next_trial_s[name], COMPARING)
                row.why = why if row.status == "not tried" else row.why
            if outcome is None:
                break  # wrong, failed, or interrupted by another regime, which is recorded; or cut short
            outcome, how = self._with_earlier(name, outcome) if len(settings) == 1 else (outcome, "")
            if outcome.verdict == "keep":
                self.plan = trial_plan
                if candidate.lasting:
                    self._lasting[name] = outcome
            self._ledger.judge(candidate, setting, outcome, self.plan)
            row.why += how
            if outcome.verdict == "keep":
                yield from self._measure_anatomy()
        self.recollection.tried(name, self.elapsed_s - began_s)

    def _guarded(self, candidate: Candidate, setting: object) -> Generator[Action, Result, tuple[Choices, bool]]:
        """Return the plan so far with a setting, and whether the guard passes it.

        In the guard's steps a strategy of the plan may trip: then it is the plan without that one that is looked at.
        """
        name = candidate.name
        while True:
            trial_plan = {**self.plan, name: setting}
            passed = self._passed.get(name) == trial_plan or (yield from self._guard(candidate, trial_plan))
            if not passed or trial_plan == {**self.plan, name: setting}:
                return trial_plan, passed

    def _limit(self) -> Callable[[], float]:
        """Return what a trial may cost: nothing from when other processes have come or left, which goes first."""
        limit_s = self._trial_limit_s()
        return lambda: limit_s if self._neighbours.news is None else -math.inf

    def _with_earlier(self, name: str, outcome: Outcome) -> tuple[Outcome, str]:
        """Keep what this run's trial and an earlier one leave open by noise and show together; say so."""
        if (
            outcome.verdict != "refused"
            or outcome.saved_faults == 0
            or not self.recollection.shows_with(name, outcome, self._config.keep_gain)
        ):
            return outcome, ""
        how = ", as in an earlier run: noise left each trial open, both together do not"
        return replace(outcome, verdict="keep"), how

    def _note_work(self, candidate: Candidate, setting: object, seconds: float) -> None:
        if worked := self.recollection.worked({candidate.name: setting}, seconds):
            self._note(worked)

    def _if_much_slower(self, name: str, config: TrialConfig) -> Verdict | None:
        """Return the verdict where the first steps are much slower: two such trials end in a drop."""
        if name in self._postponed:
            return "drop"
        return "refused" if config == self._brief else None
