"""What has been kept, looked at once more: whether its numbers are right still, and whether it still pays."""

from __future__ import annotations

from collections.abc import Sequence

from accel.profiler.trial import Verdict
from accel.search.actions import Action, Result
from accel.search.experiments import Decisions
from accel.search.takeover import TakeOver


class LaterChecks(TakeOver):
    """Check a finished plan from time to time; the arguments are those of `Experiments`."""

    def _recheck_numbers(self, result: Result) -> Decisions:
        """Undo the plan if the guard's later check has failed, and fails again with each of the next batches."""
        again = 0
        while result.finding is not None and result.finding.problem and self.plan:
            if again == self._pace.confirm:
                for name in list(self.plan):
                    self._remove(name, f"the guard's later check failed: {result.finding.problem}")
                return
            result = yield from self._act(Action(plan=self.plan, steps=1, check=dict(self.plan), settled=True))
            if self._changed(result):
                return
            again += 1

    def _retry_kept(self, names: Sequence[str], if_much_slower: Verdict | None = None) -> Decisions:
        """Try the plan without each of these in turn, and undo those that no longer pay.

        What is tried in whole epochs stays: a trial takes many of them, and steps say nothing of how epochs begin. So
        does that without which the model would be compiled once more, while what compiles, which comes first, is on.

        Args:
            names: strategies of the plan.
            if_much_slower: the verdict where its first steps are much slower than those without it.
        """
        for name in sorted(names, key=lambda name: not self._candidates[name].compiles):
            candidate = self._candidates[name]
            if name not in self.plan or candidate.by_epoch() or candidate.lasting:
                continue
            if self._compiled_without(candidate) is not None:
                continue
            without = {n: s for n, s in self.plan.items() if n != name}
            settle = candidate.settling(self.plan[name])
            outcome = yield from self._trial(without, dict(self.plan), settle, self._config.of_kept(), if_much_slower)
            if self._is_interrupted():
                return
            if outcome is not None and outcome.verdict == "drop":
                self._remove(name, f"it no longer pays: {outcome.gain:.2f}x when tried again at step {self.steps}")
