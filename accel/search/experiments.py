"""Experiments on the run: an action, a check by the guard, a trial; what each cost, and what a failure undoes."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import replace

from accel.profiler import naming
from accel.profiler.diagnose import anatomy
from accel.profiler.diagnose.communication_wait import wait_as_communication
from accel.profiler.evidence import Evidence
from accel.profiler.trial import Outcome, TrialConfig, Verdict
from accel.report import Event, Status, StrategyRow
from accel.search import check_cost, lasting_trials, priority, trials
from accel.search.actions import Action, Candidate, Result
from accel.search.budget import Budget
from accel.search.host_load import Neighbours
from accel.search.ledger import Ledger, refusal, waiting_for
from accel.search.one_off import SettingsLeft
from accel.search.pace import Pace
from accel.search.plan import Choices
from accel.search.remembered import Recollection

_OVERSPENT = 0.01
"""Share of the run so far that a trial may cost where less than that is left of the budget."""

_MARGIN = 1.1
"""The run may have become faster since the plain step was measured."""

Decisions = Generator[Action, Result, None]
Trying = Generator[Action, Result, "Outcome | None"]
Comparing = Generator[Action, Result, "trials.TrialResult | None"]


class Experiments:
    """The plan so far, the experiments that the controller asks for, and which of them the run can afford.

    Args:
        candidates: what may be tried, in registry order.
        recollection: what an earlier run found.
        budget: what the search may cost.
        config: the statistics of a trial.
        pace: step counts.
        reduce: how a block of step times becomes one number.
        announce: called with each decided row, its number among those to be tried (0 for one that is announced again or
            is not to be tried), and their total.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        recollection: Recollection,
        budget: Budget,
        *,
        config: TrialConfig | None = None,
        pace: Pace | None = None,
        reduce: Callable[[Sequence[float]], float] = statistics.median,
        announce: Callable[[StrategyRow, int, int], None] = lambda row, done, total: None,
    ) -> None:
        self._candidates = {candidate.name: candidate for candidate in candidates}
        self._config = config or TrialConfig()
        self._pace = pace or Pace()
        self._reduce = reduce
        self._ledger = Ledger(candidates, announce, self._config.drop_gain)
        self._budget = budget
        self.recollection = recollection
        """What an earlier run found."""
        self.plan: Choices = {}
        """The best plan so far, which an interrupted run keeps."""
        self.searching = True
        self.anatomy_after: dict[str, float] = {}
        self.diagnosis = naming.diagnose(Evidence())
        """The profiler's verdict on the plan as it is now."""
        self.steps = self.search_steps = 0
        self.plain_ms = 0.0
        self.elapsed_s = self.cost_s = self.saved_s = 0.0
        self._before_s = 0.0
        """How long the run had lasted before its first step, as far as that counts in the budget."""
        self._check_s: dict[str, float] = {}
        """What is compared → what the guard's next comparison of it will cost by the last one, without one-off work."""
        self._passed: dict[str, Choices] = {}
        """The last plan with each candidate that the guard has passed."""
        self._next_trial_s: dict[str, float] = {}
        """Candidates whose trial was cut short → what the next one must be allowed to cost."""
        self._cut_short_s: float | None = None  # what the last trial has cost, if it was cut short
        self._pending = [c.name for c in candidates if c.ruled_out is None]
        self._left = SettingsLeft()
        self._charged: set[str] = set()  # for work beside the loop, as it began
        self._lasting: dict[str, Outcome] = {}
        """What may have a lasting effect and is kept → what its own trial has shown."""
        self._neighbours = Neighbours()
        self._follows_host = True
        """The plan follows the load of the host."""
        self._is_following = False
        """What is tried now is an answer to that."""
        self._next_look_s = 0.0
        self._tripped: set[str] = set()
        self._just_observed: Sequence[float] = ()
        """Seconds of the plain steps before a remembered plan."""
        self.faulting: float | None = None
        """Share of the step that page faults take at most, under the plan as it is now."""
        self._page_faults: float | None = None
        self._looked_at = 0
        """Step at which these, and the anatomy, were measured."""
        self._regime: object = None
        self._regime_changed = False
        self._reopened = 0
        self.closing: Outcome | None = None
        """The closing trial: plain against the whole plan."""
        self._closed: Choices = {}
        """The plan that the closing trial was about."""
        self._epochs_outcome: tuple[Choices, Choices, Outcome] | None = None
        """The last trial in whole epochs: both plans, and what it found."""
        self._blocks_outcome: tuple[Choices, Choices, Outcome] | None = None
        """The same of the last trial in blocks, in this search."""

    @property
    def rows(self) -> dict[str, StrategyRow]:
        """The report's rows, by name."""
        return self._ledger.rows

    @property
    def events(self) -> list[Event]:
        """What happened at which step."""
        return self._ledger.events

    # -- actions -----------------------------------------------------------------------------------------------------

    def _act(self, action: Action) -> Generator[Action, Result, Result]:
        looks = self.elapsed_s >= self._next_look_s and bool(self._freeing())
        result = yield replace(action, base=action.plan == self.plan, host=looks)
        self._ledger.begin_turn()
        self.steps += result.steps
        self.elapsed_s += result.elapsed_s + result.aside_s
        self.saved_s += result.elapsed_s * (self._shown_gain(action.plan) - 1)
        if self.searching or self._is_following:
            self.cost_s += result.aside_s
        if looks:
            self._next_look_s = self.elapsed_s + self._pace.until_look(result.load)
        self._neighbours.see(result.load)
        self._ledger.moving = self._is_another(result)
        for name, why in result.trips.items():
            self._record_trip(name, f"{why} at step {self.steps}", action)
        return result

    def _record_trip(self, name: str, why: str, action: Action) -> None:
        """Undo a strategy; where another setting of it was being tried, the kept one stays."""
        tried = {**action.plan, **(action.check or {})}
        if name in self.plan and name in tried and tried[name] != self.plan[name]:
            setting = self._candidates[name].describe(tried[name])
            self._note(f"{name} {setting} undone: {why}; {self.rows[name].setting} stays")
            return
        self._tripped.add(name)
        self._remove(name, why)

    def _shown_gain(self, plan: Choices) -> float:
        """Return by how much a plan is faster than the plain loop at the least, as a ratio; 1 if that isn't known."""
        if plan and plan == self._closed == self.plan and self.closing is not None:
            return max(1.0, self.closing.low)
        rows = [self.rows[name] for name, setting in plan.items() if self.plan.get(name, self) == setting]
        return math.prod(max(1.0, row.gain_low or 1.0) for row in rows if row.status == "kept")

    def _undisturbed(self, action: Action) -> Generator[Action, Result, Result | None]:
        """Run an action of a trial; None if its steps can't be compared."""
        result = yield from self._act(action)
        return None if self._changed(result) or result.trips else result

    def _changed(self, result: Result) -> bool:
        """Return whether this action ran under another regime than the plan was measured for."""
        if self._is_another(result):
            self._regime, self._regime_changed = result.regime, True
            return True
        self._regime = result.regime if self._regime is None else self._regime
        return False

    def _is_interrupted(self) -> bool:
        return self._regime_changed

    def _is_another(self, result: Result) -> bool:
        both_known = self._regime is not None and result.regime is not None
        return both_known and result.regime != self._regime and self._reopened < self._pace.reopenings

    def _remove(self, name: str, why: str, *, is_slower: bool = False) -> None:
        """Undo a strategy of the plan.

        Args:
            name: of it.
            why: for the report.
            is_slower: it does not pay as things are; what was kept beside other processes has its turn on a quiet host.
        """
        self.plan = {n: s for n, s in self.plan.items() if n != name}
        self._lasting.pop(name, None)
        before = self._neighbours.undone(name)
        self._note(f"{name} undone: {why}")
        if name in self._pending:
            self._pending.remove(name)
        self._ledger.decide(name, "undone", why)
        if before is not None and is_slower:
            self._ledger.restore(before.row)
            if before.was_pending:
                self._pending = [other for other in self._candidates if other in (*self._pending, name)]

    def _note(self, text: str) -> None:
        self._ledger.note(self.steps, text)

    # -- costs -------------------------------------------------------------------------------------------------------

    def _is_ready(self, name: str) -> bool:
        return self._may_be_tried_now(self._candidates[name]) and not self._waiting_for(self._candidates[name])

    def _waiting_for(self, candidate: Candidate) -> str:
        """Ask what a candidate waits for, and say it; work that begins then, and is expected no more, is charged."""
        name, row, expected_s = candidate.name, self.rows[candidate.name], self._one_off_s(candidate)
        waits = waiting_for(candidate)
        if waits and row.status == "not tried" and not refusal(candidate):
            self._ledger.decide(name, "not tried", waits)
        if waits and candidate.is_preparing() and (begun_s := expected_s - self._one_off_s(candidate)) > 0:
            self._charged.add(name)
            self.cost_s += begun_s
            row.cost_s += begun_s
        return waits

    def _may_be_tried_now(self, candidate: Candidate) -> bool:
        """Return whether neither the budget nor an earlier run's verdict speaks against it."""
        if self.recollection.postponed(candidate.name, self.elapsed_s):
            return False
        return self._affordable(self._expected_s(candidate))

    def _waits_no_more(self) -> bool:
        """Return whether something that waited can be tried now; what turns out not to apply waits no more."""
        for name in list(self._pending):
            if self._is_ready(name):
                return True
            if why := refusal(self._candidates[name]):
                self._pending.remove(name)
                self._decide_unless_kept(name, "not applicable", why)
        return False

    def _decide_unless_kept(self, name: str, status: Status, why: str) -> None:
        """Decide about a candidate; where one setting of it is kept, only the others are tried no more."""
        self._left.forget(name)
        if name not in self.plan:
            self._ledger.decide(name, status, why)

    def _may_be_tried_at_once(self, candidate: Candidate) -> bool:
        """Return the same on a crowded machine: what is urgent doesn't wait until the budget allows for its check."""
        if not priority.is_urgent(candidate, self.anatomy_after, self._pace):
            return self._may_be_tried_now(candidate)
        postponed = self.recollection.postponed(candidate.name, self.elapsed_s)
        return not postponed and self._affordable(self._one_off_s(candidate))

    def _expected_s(self, candidate: Candidate) -> float:
        """Return what trying a candidate will cost at the least, s: its one-off work and its check by the guard."""
        expected_s = self._one_off_s(candidate) + self._expected_check_s(candidate)
        return max(expected_s, self._next_trial_s.get(candidate.name, 0.0))

    def _expected_check_s(self, candidate: Candidate) -> float:
        if not candidate.is_compared:
            return 0.0
        compared = check_cost.compared(candidate)
        data_s = self.anatomy_after.get("data", 0.0)
        expected_s = check_cost.expected_s(compared, self._pace.guard, self.plain_ms / 1e3, data_s)
        return self._check_s.get(compared, expected_s)

    def _freeing(self) -> list[Candidate]:
        """Return the candidates that apply and use fewer cores, if the plan follows the load of the host."""
        candidates = self._candidates.values() if self._follows_host else ()
        return [each for each in candidates if each.frees_cores and each.ruled_out is None and not refusal(each)]

    def _quiet_plan(self) -> Choices:
        """Return the plan without what is in it only for the other processes that are there."""
        return {name: setting for name, setting in self.plan.items() if name not in self._neighbours.beside}

    def _trial_limit_s(self) -> float:
        """Return what a trial may cost before it is cut short: doubled, that is what its next one must wait for."""
        left_s = self._budget.in_all(elapsed=self._lasted_s, saved=self.saved_s) - self.cost_s
        return max(left_s, _OVERSPENT * self._lasted_s)

    def _one_off_s(self, candidate: Candidate) -> float:
        """Return the seconds of one-off work to expect of the setting that is tried next."""
        setting = self._left.first(candidate)
        return self.recollection.one_off_s(candidate, setting) + self._recompiling_s(candidate, setting)

    def _recompiling_s(self, candidate: Candidate, setting: object) -> float:
        """Return the seconds to expect of compiling once more, where a candidate changes how compiled calls run."""
        compiled = self._compiled_without(candidate)
        if compiled is None or self._passed.get(candidate.name) == {**self.plan, candidate.name: setting}:
            return 0.0  # for such a plan the guard's check has compiled already
        return self.recollection.took_s(compiled, self.plan[compiled.name])

    def _compiled_without(self, candidate: Candidate) -> Candidate | None:
        """Return what compiles in the plan, if a switch of this candidate would make it compile once more.

        A graph is for one layout, one precision and one number of threads. One that touches no call, or compiles
        itself, changes none of these.
        """
        if candidate.compiles or not candidate.acts_on_calls:
            return None
        return next((other for name in self.plan if (other := self._candidates[name]).compiles), None)

    @property
    def _lasted_s(self) -> float:
        """How long the run has lasted, as the budget has it: nothing shortens what came before the first step."""
        return self._before_s + self.elapsed_s

    def _affordable(self, expected: float) -> bool:
        return self._budget.allows(spent=self.cost_s, expected=expected, elapsed=self._lasted_s, saved=self.saved_s)

    def _affordable_in_a_run_of(self, expected: float, length_s: float, saved_s: float) -> bool:
        """Return whether a cost is allowed, if this run lasts, and is shortened, as an earlier one."""
        elapsed_s = max(self.elapsed_s, length_s)
        return self._budget.allows(spent=self.cost_s, expected=expected, elapsed=elapsed_s, saved=saved_s)

    def _steps_until_affordable(self, names: Collection[str]) -> float:
        """Return after how many steps the first of these will be affordable; infinite if none waits for that."""
        waiting = [name for name in names if not self.recollection.postponed(name, self.elapsed_s)]
        expected = [self._expected_s(self._candidates[name]) for name in waiting]
        expected = [seconds for seconds in expected if not self._affordable(seconds)]  # others wait for something else
        if not expected or self.plain_ms <= 0:
            return math.inf
        from_s = self._budget.allowed_from(spent=self.cost_s, expected=min(expected), saved=self.saved_s)
        return _MARGIN * max(0.0, from_s - self._lasted_s) / (self.plain_ms / 1e3) + 1

    # -- measuring ---------------------------------------------------------------------------------------------------

    def _measure_anatomy(self) -> Decisions:
        """Measure the anatomy of the step under the present plan."""
        result = yield from self._act(Action(plan=self.plan, steps=self._pace.observe, anatomy=True))
        self._record_anatomy(result)

    def _record_anatomy(self, result: Result) -> None:
        """Update the anatomy of the step and its diagnosis under the present plan."""
        if result.measurements:
            wait_share = None if result.evidence is None else result.evidence.ddp_wait_share
            self.anatomy_after = anatomy.typical(wait_as_communication(result.measurements, wait_share))
            self.diagnosis = result.diagnosis
            self.faulting = priority.faulting(result.evidence)
            self._page_faults, self._looked_at = result.page_faults, self.steps

    def _too_little(self, candidate: Candidate) -> str:
        """Say why all that a candidate can shorten is too little of the step; '' if it is not."""
        if candidate.name in self._lasting:  # it has shortened it already
            return ""
        return priority.too_little(candidate, self.anatomy_after, self._config.drop_gain, self.faulting)

    # -- guard and trial ---------------------------------------------------------------------------------------------

    def _guard(self, candidate: Candidate, trial_plan: Choices) -> Generator[Action, Result, bool]:
        if not candidate.is_compared:
            return True
        row, cost_s = self.rows[candidate.name], self.cost_s
        # With fewer threads nothing can be stale, and where they are wanted a comparison's plain steps are slow.
        steps = 1 if candidate.frees_cores else self._pace.guard
        result = yield from self._act(Action(plan=self.plan, steps=steps, check=trial_plan))
        # Fewer threads may have been compared with the step itself, which takes half as long as with two replays.
        is_by_step = candidate.frees_cores and not (result.finding is not None and result.finding.seconds)
        works = candidate.one_off_s or candidate.expected_s is not None or is_by_step
        if not works and self._compiled_without(candidate) is None:  # else it may be mostly that
            # The session books a check after the last step to the next action: its own time says what it took.
            took_s = check_cost.measured_s(result.finding, self._pace.guard, self.cost_s - cost_s)
            self._check_s[check_cost.compared(candidate)] = took_s
        if self._changed(result) or candidate.name in result.trips:
            return False
        finding = result.finding
        if finding is None:
            return True
        if (finding.problem or finding.unsure) and candidate.name in self.plan:  # another setting of it is kept
            setting = candidate.describe(trial_plan[candidate.name])
            why = f"is wrong: {finding.problem}" if finding.problem else f"was not compared: {finding.unsure}"
            self._note(f"{candidate.name} {setting} {why}; {row.setting} stays")
            return False
        self._ledger.compared(candidate.name, finding)
        if finding.problem:
            self._ledger.decide(candidate.name, "undone", f"wrong: {finding.problem}")
        elif finding.unsure:
            self._ledger.decide(candidate.name, "not tried", f"the guard could compare nothing: {finding.unsure}")
        return not finding.problem and not finding.unsure

    def _guard_whole(self, plan: Choices) -> Generator[Action, Result, str]:
        """Check a plan as a whole before any of it is on; return what speaks against it, else ''."""
        result = yield from self._act(Action(plan=self.plan, steps=self._pace.guard, check=plan))
        if self._changed(result):
            return "the batches changed meanwhile"
        if failed := [f"{name}: {why}" for name, why in result.trips.items() if name in plan]:
            return failed[0]
        finding = result.finding
        if finding is None:
            return ""
        if finding.problem:
            return f"wrong: {finding.problem}"
        if finding.unsure:
            return f"the guard could compare nothing: {finding.unsure}"
        # The comparison is of all together. What is exact moves no number, so the others have moved them.
        level = max(self._candidates[name].exactness for name in plan)
        for name in plan:
            if self._candidates[name].exactness == level:
                self._ledger.compared(name, finding)
        return ""

    def _trial(
        self,
        a: Choices,
        b: Choices,
        settle: int,
        config: TrialConfig | None = None,
        if_much_slower: Verdict | None = None,
        limit_s: Callable[[], float] = lambda: math.inf,
    ) -> Trying:
        """Run one trial; None if a strategy tripped or the regime changed meanwhile, or it was cut short.

        What may have a lasting effect has a trial of its own; once that has kept it, it is in both plans.
        """
        self._cut_short_s = None
        lasting = {n: s for n, s in b.items() if n not in a and self._candidates[n].lasting}
        if lasting:
            return (yield from self._lasting_trial(a, b, lasting, settle, config))
        in_epochs = any(self._candidates[n].by_epoch() for n in (*a, *b) if a.get(n, self) != b.get(n, self))
        if in_epochs:
            tried = yield from trials.by_epochs(self._undisturbed, a, b, config=self._config)
        else:
            tried = yield from trials.by_blocks(
                self._undisturbed,
                a,
                b,
                settle=settle,
                config=(config or self._config).for_steps_of(self.plain_ms / 1e3),
                reduce=self._reduce,
                if_much_slower=if_much_slower,
                limit_s=limit_s,
            )
        if tried is None:
            return None
        self.cost_s += tried.cost_s
        if tried.cut_short:
            self._cut_short_s = tried.cost_s
            return None
        if in_epochs:
            self._epochs_outcome = dict(a), dict(b), tried.outcome
        elif self.searching or self._is_following:
            self._blocks_outcome = dict(a), dict(b), tried.outcome
        return tried.outcome

    def _lasting_trial(
        self, a: Choices, b: Choices, lasting: Choices, settle: int, config: TrialConfig | None
    ) -> Trying:
        """Run a trial of a plan that has strategies with a lasting effect; the part of those kept is known already."""
        outcomes = []
        # All page faults gone, each of them on the way of the step's last result.
        most = math.inf if self.faulting is None or self.faulting >= 1 else 1 / (1 - self.faulting)
        for name, setting in lasting.items():
            outcome = self._lasting.get(name)
            if outcome is None:
                own_settle = self._candidates[name].settling(setting)
                tried = yield from self._own_lasting_trial(a, {**a, name: setting}, own_settle, config)
                if tried is None:
                    return None
                self.cost_s += tried.cost_s
                outcome = lasting_trials.at_most(tried.outcome, most, self._config.keep_gain)
                outcome = lasting_trials.by_faults(outcome, self._config.drop_gain)
            outcomes.append(outcome)
        outcome = functools.reduce(trials.together, outcomes)
        with_lasting = {**a, **lasting}
        if b != with_lasting:
            rest = yield from self._trial(with_lasting, b, settle, config)
            return None if rest is None else trials.together(outcome, rest)
        return outcome

    def _own_lasting_trial(self, a: Choices, b: Choices, settle: int, config: TrialConfig | None) -> Comparing:
        """Try one strategy with a lasting effect: in turns for as long as the steps without it fault as before."""
        step_s = max(self.plain_ms / 1e3, 1e-4)
        config = replace((config or self._config).for_steps_of(step_s), more_looks=())  # all others wait
        seen = self._just_observed
        compare: Callable[..., Generator[Action, Result, trials.TrialResult | None]] = (
            lasting_trials.in_turns_unless_it_lasts
        )
        if self.faulting is None or seen:
            compare = functools.partial(
                lasting_trials.before_and_after, before=seen, faults=self._page_faults if seen else None
            )
            settle += 1
        return (
            yield from compare(
                self._undisturbed, a, b, settle=settle, config=config, reduce=self._reduce, step_s=step_s
            )
        )
