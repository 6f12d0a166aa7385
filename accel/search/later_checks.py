"""What has been kept, looked at once more: whether its numbers are right still, and whether it still pays."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from accel.profiler.trial import Verdict
from accel.search.actions import Action, Result
from accel.search.batch_growth import BatchGrowth
from accel.search.experiments import Decisions
from accel.search.takeover import TakeOver


class LaterChecks(TakeOver):
    """Check a finished plan from time to time; the arguments are those of `Experiments`."""

    _growth: BatchGrowth

    def _goes_on_with(self, result: Result) -> bool:
        """Return whether the batch controller has changed the batch, and the plan that is on will do for it as well."""
        self._growth.add(result.growth)
        of_shape = any(self._candidates[name].of_shape for name in self.plan)
        if result.growth == 1.0 or of_shape or not self._growth.is_alike:
            return False
        self._regime = result.regime
        return True

    def _doubtful(self) -> list[str]:
        """Return what of the plan is to be tried again beside the guard's check; after that it no longer is."""
        if self._growth.is_unchecked:
            self._growth.is_unchecked = False
            return list(self.plan)
        # Step times don't show that the machine was busy during the search and is quiet now (or the reverse).
        return [name for name in self.plan if self._candidates[name].host_dependent]

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

    def _retry_kept(self, names: Sequence[str]) -> Decisions:
        """Try the plan without each of these in turn, and undo those that no longer pay.

        What is tried in whole epochs stays: a trial takes many of them, and steps say nothing of how epochs begin. So
        does that without which the model would be compiled once more, while what compiles, which comes first, is on;
        and what is there for other processes, while these are.
        """
        for name in sorted(names, key=lambda name: not self._candidates[name].compiles):
            candidate = self._candidates[name]
            if name not in self.plan or candidate.by_epoch() or candidate.lasting:
                continue
            if self._compiled_without(candidate) is not None:
                continue
            if name in self._neighbours.beside and self._neighbours.are_here:
                continue
            yield from self._retry(name)
            if self._is_interrupted():
                return

    def _retry(self, name: str, if_much_slower: Verdict | None = None) -> Generator[Action, Result, Verdict | None]:
        """Try the plan without a strategy, undo that if it no longer pays, and return the verdict, if there is one.

        Args:
            name: of the plan.
            if_much_slower: the verdict where its first steps are much slower than those without it.
        """
        without = {n: s for n, s in self.plan.items() if n != name}
        settle = self._candidates[name].settling(self.plan[name])
        outcome = yield from self._trial(without, dict(self.plan), settle, self._config.of_kept(), if_much_slower)
        if self._is_interrupted() or outcome is None:
            return None
        if outcome.verdict == "drop":
            why = f"it no longer pays: {outcome.gain:.2f}x when tried again at step {self.steps}"
            self._remove(name, why, is_slower=True)
        return outcome.verdict
