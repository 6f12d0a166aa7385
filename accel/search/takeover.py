"""Plans from outside: one that is replayed, and what an earlier run found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from accel.profiler.trial import Outcome
from accel.search.actions import Candidate
from accel.search.closing import Closing
from accel.search.experiments import Decisions, Trying
from accel.search.ledger import SAVES_NO_FAULTS, refusal
from accel.search.plan import Choices


class TakeOver(Closing):
    """Take plans over; the arguments are those of `Experiments`."""

    _say: Callable[[str], None]

    def _take_over(self, choices: Choices) -> Decisions:
        """Switch a replayed plan on, strategy by strategy, each after the guard's check."""
        for name, setting in choices.items():
            candidate = self._candidates[name]
            why = candidate.ruled_out[1] if candidate.ruled_out else refusal(candidate)
            if why:
                self._ledger.decide(name, "not applicable", why)
                continue
            self.rows[name].setting = candidate.describe(setting)
            if (yield from self._guard(candidate, {**self.plan, name: setting})):
                self.plan = {**self.plan, name: setting}
                self._ledger.decide(name, "kept", "taken over from the plan, without a trial")

    def _recall(self, observed: Sequence[float]) -> Decisions:
        """Try what an earlier run found, as a whole; unless it is shown to be faster once more, it is undone.

        What was shown then counts too: where noise leaves this run's trial open, both together decide.

        Args:
            observed: seconds of the plain steps just before.
        """
        recollection = self.recollection
        recollection.recall()
        plan = recollection.choices(self._affordable_in_a_run_of)
        if recollection.text:
            self._note(f"remembered {recollection.text}")
            self._say(f"remembered {recollection.text}")
        if not plan:
            return
        for name, setting in plan.items():
            self.rows[name].setting = self._candidates[name].describe(setting)
        remembered = list(plan)
        yield from self._recall_lasting(plan, observed)
        if not plan:
            return
        cost_s, steps = self.cost_s, self.steps
        problem = yield from self._guard_whole(plan)
        self.search_steps += self.steps - steps
        recollection.worked(plan, self.cost_s - cost_s)
        if len(plan) == 1:
            (only,) = plan
            self.rows[only].cost_s += self.cost_s - cost_s
        if problem:
            if not self._is_interrupted():
                recollection.reject(problem)
            return
        self._pending = [name for name in self._pending if name not in plan]
        self.plan = plan
        yield from self._measure_anatomy()
        yield from self._close("the remembered plan", self.recollection.agrees_on_plan)
        if self._is_interrupted():
            return
        missing = [name for name in plan if name not in self.plan and name not in self._tripped]
        if self.plan and not missing:
            gone = [name for name in remembered if name not in plan]
            self._confirm(plan, [name for name in gone if self.rows[name].status != "not tried"])
            return
        faster = f"only {', '.join(self.plan)} was" if self.plan else "it was not"
        recollection.reject(f"{faster} shown to be faster than plain")
        self._consider_again(missing)

    def _recall_lasting(self, plan: Choices, observed: Sequence[float]) -> Decisions:
        """Compare what has a lasting effect with the steps observed, and leave in the plan what gives something."""
        for name in [name for name in plan if self._candidates[name].lasting]:
            candidate, setting = self._candidates[name], plan[name]
            row, cost_s, steps = self.rows[name], self.cost_s, self.steps
            if why := self._too_little(candidate):
                self._leave_to_next_run(name, plan, why)
                continue
            self._just_observed = observed
            outcome = yield from self._trial({}, {name: setting}, candidate.settling(setting))
            self._just_observed = ()
            if outcome is not None and outcome.verdict != "keep" and not self.recollection.agrees(name, outcome):
                outcome = yield from self._in_turns_too(candidate, setting, outcome)
            row.cost_s += self.cost_s - cost_s
            row.steps += self.steps - steps
            self.search_steps += self.steps - steps
            if outcome is None:
                plan.clear()
                if not self._is_interrupted():
                    self.recollection.reject(row.why)
                return
            if outcome.verdict != "keep" and self.recollection.agrees(name, outcome):
                # The noise of one comparison would undo what was shown.
                outcome = replace(outcome, verdict="keep")
            if outcome.verdict == "keep":
                self._lasting[name] = outcome
            elif outcome.verdict == "refused" and outcome.saved_faults == 0:
                self._leave_to_next_run(name, plan, SAVES_NO_FAULTS)
            else:
                self._ledger.judge(candidate, setting, outcome, {})
                self._ledger.settle(name)
                self._pending.remove(name)
                del plan[name]
        if not plan and self.recollection.is_checking:
            self.recollection.reject("it was not shown to be faster than plain")

    def _leave_to_next_run(self, name: str, plan: Choices, why: str) -> None:
        """Take what can't show now what it gives out of a remembered plan; it is tried later if it can then."""
        self.recollection.wait_with(name, plan.pop(name), plan)
        self._ledger.decide(name, "not tried", f"{why}; left to the next run")

    def _in_turns_too(self, candidate: Candidate, setting: object, outcome: Outcome) -> Trying:
        """Return what blocks in turns show of what has a lasting effect, if plain steps still fault as before it."""
        if self.faulting is None:
            return outcome
        yield from self._measure_anatomy()
        if self._too_little(candidate):
            return outcome
        return (
            yield from self._trial({}, {candidate.name: setting}, candidate.settling(setting), self._config.brief())
        )

    def _confirm(self, plan: Choices, undone: Sequence[str]) -> None:
        """Record that the closing trial has shown the remembered plan, but for what was undone, to be faster."""
        is_open = self.closing is not None and self.closing.verdict != "keep"
        self.recollection.confirm(undone, is_open=is_open)
        for name in self.plan:
            if len(plan) == 1 and self.closing is not None and self.closing.verdict == "keep":
                self._ledger.judge(self._candidates[name], plan[name], self.closing, self.plan)
            self._ledger.take_over(name, self.recollection.reason(name))
        self.remember()

    def _consider_again(self, names: Collection[str]) -> None:
        """Let the search try these, whatever has been decided so far."""
        for name in names:
            self._ledger.withdraw(name)
        self._pending = [name for name in self._candidates if name in self._pending or name in names]
        self.closing, self._closed = None, {}

    def remember(self, *, ended: bool = False) -> None:
        """Keep what is known by now for the next run.

        Args:
            ended: the run is over.
        """
        plan = self._quiet_plan()
        rows = {name: row for name, row in self.rows.items() if name in plan or name not in self.plan}
        closing = self.closing if plan == self._closed else None
        open_rows = [name for name in rows if self._ledger.is_open(name)]
        self.recollection.store(plan, rows, closing, self.elapsed_s, open_rows=open_rows, ended=ended)
