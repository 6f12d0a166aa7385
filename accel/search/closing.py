"""The closing trial: the whole plan against the plain loop."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection

from accel.profiler.diagnose import causes
from accel.profiler.trial import Outcome
from accel.search import priority, trials
from accel.search.experiments import Decisions, Experiments
from accel.search.ledger import refusal
from accel.search.plan import Choices

_CLOSING_PAIRS = 6
"""Pairs of blocks that a closing trial has at the least, and so a trial that stands for it."""


class Closing(Experiments):
    """Close a search; the arguments are those of `Experiments`."""

    def _close(
        self,
        what: str = "the plan as a whole",
        agrees: Callable[[Collection[str], Outcome], bool] = lambda plan, outcome: False,
    ) -> Decisions:
        """Try the whole plan against the plain loop; unless it is shown to be faster, it is undone.

        Args:
            what: the plan, in the reason for undoing it.
            agrees: whether an outcome that shows nothing by itself does so together with an earlier run's.
        """
        if not self.plan:
            return
        settle = max(self._candidates[name].settling(setting) for name, setting in self.plan.items())
        steps = self.steps
        plan = dict(self.plan)
        outcome = self._known_outcome(plan) or (yield from self._trial({}, plan, settle))
        self.search_steps += self.steps - steps
        if outcome is None:
            if self.plan and not self._is_interrupted():
                yield from self._close(what, agrees)  # a strategy tripped and is gone: close with the rest
            return
        self.closing, self._closed = outcome, plan
        if outcome.verdict != "keep" and not agrees(plan.keys(), outcome) and not self._bears_out_trials(plan, outcome):
            for name in priority.first_undone(plan, self._candidates):
                why = f"{what} was not shown to be faster than plain in the closing trial"
                self._remove(name, why, is_slower=True)
            yield from self._close(what, agrees)
            return
        yield from self._measure_anatomy()

    def _bears_out_trials(self, plan: Choices, outcome: Outcome) -> bool:
        """Tell whether a closing trial that noise has left open shows no loss, and a gain together with the trials.

        Each of these was measured on top of the ones before, so their product is of the same plan.
        """
        if outcome.verdict != "refused" or any(self._candidates[name].lasting for name in plan):
            return False
        shown = self._ledger.shown(plan)
        return shown is not None and trials.bears_out(outcome, *shown)

    def _known_outcome(self, plan: Choices) -> Outcome | None:
        """Return the outcome of a plan against the plain loop, if it is one strategy, whose own trial was of just that.

        What has a lasting effect may be in the plan too: its trial has been. Of trials in blocks only the very last
        counts: of several candidates, the luckiest would be kept without a second trial.
        """
        epochs, blocks = self._epochs_outcome, self._blocks_outcome
        if epochs is not None and epochs[:2] == ({}, plan):
            return epochs[2]
        lasting = {name: setting for name, setting in plan.items() if name in self._lasting}
        if blocks is None or blocks[:2] != (lasting, plan):
            return None
        if blocks[2].verdict != "keep" or blocks[2].pairs < _CLOSING_PAIRS:
            return None
        return functools.reduce(trials.together, [*(self._lasting[name] for name in lasting), blocks[2]])

    def why_open(self) -> tuple[str, str]:
        """Say why there is no verdict yet, and what would bring it sooner; '' twice if nothing is left to decide."""
        if not self.plain_ms:
            return "too few steps to time the plain loop", "it takes a longer run"
        if self.recollection.is_checking:
            return "the remembered plan was still being checked", "the next run checks it again"
        if (crowd := self.diagnosis.crowd) is not None and crowd.cause == causes.OVERSUBSCRIBED:
            return "other processes kept the machine busy, and trials waited", "it takes a quieter machine"
        left = [
            self._expected_s(candidate)
            for name, candidate in self._candidates.items()
            if self.rows[name].status == "not tried" and not self.recollection.postponed(name, self.elapsed_s)
            if not refusal(candidate) and not self._too_little(candidate)
        ]
        expected_s, longer = min(left, default=0.0), "a longer run decides"
        if self._budget.share < 1:
            enough = f"{max(30, math.ceil(self.cost_s + 2 * expected_s))}s"
            longer = f'to decide sooner: budget="{enough}" (accel run --budget {enough}), or a longer run'
        if not left:
            return ("the trial of the whole plan had not ended", longer) if self.plan and self.searching else ("", "")
        from_s = self._budget.allowed_from(spent=self.cost_s, expected=expected_s, saved=self.saved_s)
        if self._lasted_s < from_s < math.inf:
            return f"the budget of {self._budget.text} allows the next trial {from_s:.0f} s into the run", longer
        return "trials were under way", longer
