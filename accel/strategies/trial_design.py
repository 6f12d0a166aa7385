"""How a strategy is judged: what its trial looks like, what it costs, and when it is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from accel.profiler.trial import TrialConfig, Verdict
from accel.profiler.trial_driver import Comparing, Reduce, by_blocks, by_epochs

if TYPE_CHECKING:
    from accel.guard.guard import Comparison as Finding
    from accel.guard.guard import Recording, Replayed
    from accel.strategies.base import Exactness
    from accel.strategies.intraop_threads import OtherProcesses


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What the search asks of a trial."""

    config: TrialConfig
    settle: int
    """Steps to leave out after each switch."""
    reduce: Reduce
    """How a block of step times becomes one number."""
    step_s: float
    """About a plain step, > 0."""
    if_much_slower: Verdict | None = None
    """The verdict where the first steps are much slower; None tries it to the end."""
    limit_s: Callable[[], float] = lambda: math.inf


Replay = Callable[["Recording"], "Replayed"]
FurtherCheck = Callable[[Replay, Replay, "Recording", "Exactness"], "Finding"]
"""Compares a call under the plan without the strategy and under the plan: what the guard's own replays can't see."""


@dataclass(frozen=True, kw_only=True)
class TrialDesign:
    """How a strategy is judged: in blocks of steps, with and without it in turns, unless a subclass says otherwise.

    A strategy that is judged in another way subclasses this in its own file and overrides `trial`.
    """

    phase: str = ""
    """The one phase of the step that it can shorten (`data`, `optimizer`): not tried where that is negligible."""
    cost_s: float | Callable[[Any], float] = 0.0
    """Seconds of one-off work that the budget must allow for, or a function of the setting where each has work of its
    own. Once it has been measured, in this run or an earlier one, that counts instead."""
    settle_steps: int | Callable[[Any], int] = 1
    """Steps to leave out after each switch, or a function of the setting."""
    describe: Callable[[Any], str] = lambda setting: "" if setting is None else str(setting)
    """Says a setting in words, for the report."""
    prepare: Callable[[], str] | None = None
    """Begins what a trial must wait for in the running loop, and says what that is; '' once it can be tried. None if
    there is nothing to wait for."""
    is_preparing: bool = False
    """That is under way, so that the strategy is not closed although it is off."""
    depends_on_host: bool = False
    """Its gain depends on what else the machine does: once kept, it is tried again from time to time."""
    is_made_for_calls: bool = False
    """What its one-off work has made is for calls as they are: it is made once more for another batch shape, and if
    anything else that changes the model's calls is switched."""
    has_come_back: Callable[[], bool] = lambda: False
    """Whether what it treats takes enough of the step again, after a trial that found too little; asked in `hold`."""
    may_grow: bool = False
    """What it treats may grow as training goes on: it has its turn again where the step has become slower since its
    verdict, and the next run does not count that one as lost."""
    watch: OtherProcesses | None = None
    further_check: FurtherCheck | None = None
    note: str = ""

    order: ClassVar[int] = 0
    """Its place among all others: before them (-1) where their trials would spoil its own, after them (1)."""
    stands: ClassVar[bool] = False
    """The trial can't be repeated in turn with others: once kept it is on in both plans of every later trial, and its
    own gain is multiplied with that of the closing trial."""

    def waits(self) -> str:
        """Return what a trial must wait for in the running loop, and begin that; '' if for nothing."""
        return "" if self.prepare is None else self.prepare()

    def trial(self, terms: Terms) -> Comparing:
        """Return the trial; see `accel.profiler.trial_driver`."""
        return by_blocks(
            terms.config,
            settle=terms.settle,
            reduce=terms.reduce,
            if_much_slower=terms.if_much_slower,
            limit_s=terms.limit_s,
        )

    def too_little(self, anatomy: Mapping[str, float], least: float) -> str:
        """Say why all that it can shorten is too little of the step; '' if it is not.

        Args:
            anatomy: phase → seconds of a step.
            least: the least gain worth a trial, as a fraction.
        """
        share = self.share(anatomy)
        if share is None or share >= least:
            return ""
        return f"{self.phase} is {share:.1%} of the step: too little to win"

    def share(self, anatomy: Mapping[str, float]) -> float | None:
        """Return the share of the step that it can shorten; None if that is not one phase, or not known."""
        total = sum(anatomy.values())
        return anatomy.get(self.phase, 0.0) / total if self.phase and total > 0 else None

    def cost_of(self, setting: Any) -> float:
        """Return the seconds of one-off work that a setting is expected to take."""
        return self.cost_s(setting) if callable(self.cost_s) else self.cost_s

    def settling(self, setting: Any) -> int:
        """Return the steps to leave out after each switch to or from a setting."""
        return self.settle_steps(setting) if callable(self.settle_steps) else self.settle_steps


@dataclass(frozen=True, kw_only=True)
class EpochDesign(TrialDesign):
    """For what takes effect when an epoch begins: each block is a whole epoch, and it is tried after all others."""

    order: ClassVar[int] = 1
    stands: ClassVar[bool] = True

    def trial(self, terms: Terms) -> Comparing:
        """Return the trial, which ends after the first epoch where its phase takes too little of that."""
        return by_epochs(replace(terms.config, more_looks=()), phase=self.phase)  # those are reckoned for steps

    def too_little(self, anatomy: Mapping[str, float], least: float) -> str:
        """Return '': single steps say nothing of how epochs begin."""
        return ""
