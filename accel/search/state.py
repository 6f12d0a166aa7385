"""The state of a search and of its candidates: every function of this room takes it and does one thing with it.

A candidate:

               its turn has come, and it waits
    QUEUED ──▶ WAITING for the budget, the loop, or a longer run
      │  ▲        │ can be tried
      │  └────────┤ noise has left a brief trial open (`at_length`), or settings are left that wait for the budget
      ▼           ▼
    guard ──▶ trial ──▶ DECIDED: kept (it is in the plan) or not; also if it does not apply, or could win too little
      │           │         │ no longer pays: DECIDED, out of the plan. It was kept out of its turn: QUEUED again
      └──▶ FAILED ◀─────────┘ it is wrong, can't be switched on, trips
    RULED_OUT by the arguments of `optimize`

The search, whose actions the session runs:

    observe ─▶ remembered plan ─▶ search ─▶ closing trial ─▶ hold ─┐
      ▲                             ▲                              │ something that waited can be tried now
      │                             └──────────────────────────────┤
      └── Interrupted, at any action: other batches, loader, ranks ┘
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from accel.profiler.evidence import Evidence
from accel.profiler.interruptions import ours
from accel.profiler.trial import Outcome, TrialConfig
from accel.report import Event, StrategyRow
from accel.run.host_load import SHORTEST_LOOK_S, HostLoad
from accel.search.budget import Budget
from accel.search.plan import Choices
from accel.search.recipes import Recipe
from accel.search.remembered import RememberedPlan
from accel.strategies.base import Strategy, designed, is_compared, why_not
from accel.strategies.trial_design import TrialDesign

if TYPE_CHECKING:
    from accel.profiler.naming import Diagnosis
    from accel.search.remembered import RememberedPlans

_NOT_ASKED = "the other ranks are about to prepare it"
_WRONG = 1.1
"""A run that is so many times as long as was said goes on for who knows how long."""
_FEWEST = 5
"""Steps that an action measures at the least."""
_LOOKING = 0.005
"""Share of the time that looks at the host may take."""


class CandidateStage(Enum):
    """Where a candidate stands."""

    RULED_OUT = "the user's arguments leave it out"
    QUEUED = "its turn has not come"
    WAITING = "its turn has come, and it waits for the budget, the loop, or a longer run"
    DECIDED = "its trials are over, it does not apply, or it could win too little"
    FAILED = "it is wrong, or has failed: not tried again in this search"


@dataclass(eq=False, kw_only=True)
class Candidate:
    """A strategy bound to a run, and what the search knows of it."""

    strategy: Strategy
    run: Any
    ruled_out: tuple[str, str] | None = None
    """Report status and reason, if the user's arguments leave it out."""
    is_insisted: bool = False
    """The user has named it in `enable=`: its one-off work does not wait for the budget."""

    refused: str = ""
    """Why it did not apply when its turn came, or when the loop had been observed; not asked while it is on."""
    stage: CandidateStage = CandidateStage.QUEUED
    row: StrategyRow = field(init=False)
    at_length: bool = False
    """Noise has left its brief trial open: it comes after all others, and its trial is long."""
    settings_left: list[Any] | None = None
    """Settings that wait for their turn, while the verdict on the others stands; None if there are none."""
    passed: Choices | None = None
    """The last plan with it that the guard has passed."""
    needs_s: float = 0.0
    """What its next trial must be allowed to cost, since the last one was cut short."""
    standing: Outcome | None = None
    """The outcome of the trial that has kept it, if its design `stands`; it is in both plans of later trials."""
    done: set[str] = field(default_factory=set)
    times_reopened: int = 0
    """How often its verdict was reopened: the step had become shorter, or what it treats took more of it."""
    other_draws: bool = False
    """With it dropout draws other numbers."""

    def __post_init__(self) -> None:
        self.begin_again()

    @property
    def name(self) -> str:
        """The registered name."""
        return self.strategy.name

    @property
    def design(self) -> TrialDesign:
        """How it is judged now."""
        return designed(self.strategy, self.run)

    @property
    def is_beside_others(self) -> bool:
        """It is on, or being tried, only for as long as other processes are there."""
        watch = self.design.watch
        return watch is not None and watch.is_used

    @property
    def is_compared(self) -> bool:
        """The guard compares it with the plain path before its trial, which costs several steps."""
        return is_compared(self.strategy)

    @property
    def is_pending(self) -> bool:
        """It is still to be tried in this search."""
        return self.stage in (CandidateStage.QUEUED, CandidateStage.WAITING)

    def has_failed(self) -> bool:
        """Tell whether it is wrong, or has failed."""
        return self.stage is CandidateStage.FAILED

    def refusal(self) -> str:
        """Return why it does not apply; '' if it does."""
        return why_not(self.strategy, self.run)

    def waits(self) -> str:
        """Return what it waits for in the loop, '' if it can be tried; begins what that takes."""
        try:
            why = self.design.waits()
        except ours() as error:
            return f"its preparation failed: {type(error).__name__}: {error}"
        begun = self.run.preparing
        if why and self.run.world_size > 1:
            begun.add(self.name)
        elif self.name in begun and not (why := self.run.waits_elsewhere.get(self.name, _NOT_ASKED)):
            begun.discard(self.name)
        return why

    def settings(self) -> list[Any]:
        """Return the settings that are left, at first all of them."""
        return self.settings_left or self.strategy.settings(self.run)

    def describe(self, setting: Any) -> str:
        """Return a setting in words."""
        return self.design.describe(setting)

    def withdraw(self) -> None:
        """Withdraw the verdict; its cost still counts, and what the guard has found stands."""
        before, self.row = self.row, self._new_row()
        self.row.cost_s, self.row.steps, self.row.tolerance = before.cost_s, before.steps, before.tolerance
        self.row.output_error, self.row.gradient_error = before.output_error, before.gradient_error

    def queue_again(self) -> None:
        """Withdraw the verdict, and let its turn come again."""
        self.withdraw()
        self.stage, self.at_length, self.settings_left = CandidateStage.QUEUED, False, None

    def begin_again(self) -> None:
        """Forget what a search has found."""
        self.row = self._new_row()
        self.stage = CandidateStage.QUEUED if self.ruled_out is None else CandidateStage.RULED_OUT
        self.at_length, self.settings_left, self.passed, self.needs_s = False, None, None, 0.0
        self.standing, self.done, self.times_reopened = None, set(), 0

    def _new_row(self) -> StrategyRow:
        row = StrategyRow(
            name=self.strategy.name,
            summary=self.strategy.summary,
            treats=sorted(bottleneck.value for bottleneck in self.strategy.treats),
            exactness=self.strategy.exactness.word,
        )
        if self.ruled_out is not None:
            row.status, row.why = self.ruled_out  # type: ignore[assignment]
        return row


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The controller's step counts; docs/contributing/controller.md says what each is for."""

    observe: int = 12
    guard: int = 2
    hold: int = 50
    rest: int = 150
    recheck: int = 250
    patience: int = 250
    confirm: int = 2
    reopenings: int = 3
    look_s: float = 5.0
    slower: float = 1.10

    def until_look(self, load: HostLoad | None) -> float:
        """Return how long after a look at the host the next one is due, s; soon if it could not be told."""
        return SHORTEST_LOOK_S if load is None else max(self.look_s, load.took_s / _LOOKING)

    def hold_steps(self, step_s: float, steps: int) -> tuple[int, int]:
        """Return the steps to measure, and those of the rest before them, so that the next look is in time.

        Args:
            steps: to measure otherwise.
        """
        most = math.ceil(self.look_s / max(step_s, 1e-6))
        steps = min(steps, max(_FEWEST, most))
        return steps, max(0, most - steps)


@dataclass(eq=False, kw_only=True)
class SearchState:
    """What a search knows, has decided and has spent.

    The fields up to `steps_in_all` are what it is given: `announce` is called with each decided row; `say` prints one
    line for the user; `startup_s` tells what accel's start has cost the run before the search, and `ran_s` how long the
    run had lasted by then.
    """

    offered: Sequence[Candidate]
    """In registry order."""
    budget: Budget
    config: TrialConfig = field(default_factory=TrialConfig)
    pace: Pace = field(default_factory=Pace)
    reduce: Callable[[Sequence[float]], float] = statistics.median
    announce: Callable[[StrategyRow], None] = lambda row: None
    say: Callable[[str], None] = lambda line: None
    replay: Choices | None = None
    """Choices to take over from a plan, without a search."""
    memory: RememberedPlans | None = None
    """Keeps what is found from run to run; None remembers nothing."""
    startup_s: Callable[[], float] = lambda: 0.0
    ran_s: Callable[[], float] = lambda: 0.0
    device: str = ""
    """The kind of device, which has a recipe or not; see `Run.device_kind`."""
    steps_in_all: Callable[[], float | None] = lambda: None

    plan: Choices = field(default_factory=dict)
    """The best plan so far, which an interrupted run keeps."""
    searching: bool = True
    events: list[Event] = field(default_factory=list)
    announced: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    """Candidate → what was announced of it last."""

    steps: int = 0
    search_steps: int = 0
    searched_until: int = 0
    """Step at which the last search ended; 0 before that, and once the conditions have changed."""
    elapsed_s: float = 0.0
    before_s: float = 0.0
    """How long the run had lasted before its first step, as far as that counts in the budget."""
    cost_s: float = 0.0
    saved_s: float = 0.0
    check_s: dict[str, float] = field(default_factory=dict)
    """What is compared → what the guard's next comparison of it will cost, by the last one."""

    plain_ms: float = 0.0
    step_ms: float = 0.0
    """A step under the plan as it was at the last look, ms."""
    anatomy_before: dict[str, float] = field(default_factory=dict)
    anatomy_after: dict[str, float] = field(default_factory=dict)
    diagnosis: Diagnosis = field(default_factory=lambda: _nothing_seen())
    """The profiler's verdict on the plan as it is now."""
    plain_diagnosis: Diagnosis = field(default_factory=lambda: _nothing_seen())

    regime: object = None
    """The conditions that the plan is measured under."""
    reopened: int = 0
    new_batches: int = 0
    """How often the batch controller has changed the batch since the plan was tried last."""
    next_look_s: float = 0.0

    closing: Outcome | None = None
    """The closing trial: plain against the whole plan."""
    closed_plan: Choices = field(default_factory=dict)
    """The plan that it was about."""
    offers: dict[str, float] = field(default_factory=dict)
    """Strategy that the user's level leaves out → by how much a step would be faster with it, as a ratio."""
    last_trial: tuple[Choices, Choices, Outcome] | None = None
    """Both plans of the last trial in blocks of this search, and what it has found."""

    def __post_init__(self) -> None:
        self.candidates = {candidate.name: candidate for candidate in self.offered}
        self.recollection = RememberedPlan(self.memory)
        self.recipe = Recipe(self.device)

    @property
    def rows(self) -> dict[str, StrategyRow]:
        """The report's rows, by name."""
        return {name: candidate.row for name, candidate in self.candidates.items()}

    @property
    def lasted_s(self) -> float:
        """How long the run has lasted, as the budget has it: nothing shortens what came before the first step."""
        return self.before_s + self.elapsed_s

    @property
    def plain_s(self) -> float:
        """Seconds of a plain step, 0 while that is not known."""
        return self.plain_ms / 1e3

    @property
    def step_s(self) -> float:
        """Seconds of a present step, 0 while that is not known."""
        return (self.step_ms if self.plan and self.step_ms else self.plain_ms) / 1e3

    @property
    def to_come_s(self) -> float | None:
        """How much longer the run goes on with steps as they are now; None if that isn't known, or was said wrongly."""
        steps = self.steps_in_all()
        if steps is None or not self.step_s or self.steps > _WRONG * steps:
            return None
        return max(0.0, steps - self.steps) * self.step_s

    @property
    def has_tried(self) -> bool:
        """True if there is anything to tell of trials."""
        return any(row.steps or row.status in ("kept", "undone") for row in self.rows.values())

    @property
    def closed(self) -> Outcome | None:
        """The closing trial, if it was of the plan that is on: not once a part of that was undone, or one added."""
        return self.closing if self.plan and not self.is_unclosed else None

    @property
    def is_unclosed(self) -> bool:
        """The plan needs a closing trial; what was kept out of its turn, after that trial, doesn't."""
        return bool(self.plan) and (not self.closed_plan or self.closed_plan not in (self.plan, self.lasting_plan()))

    def lasting_plan(self) -> Choices:
        """Return the plan without what is in it only for as long as other processes are there."""
        return {name: setting for name, setting in self.plan.items() if not self.candidates[name].is_beside_others}

    def standing_plan(self) -> Choices:
        """Return the part of the plan that is in both plans of each trial, since its own trial can't be repeated."""
        return {name: setting for name, setting in self.plan.items() if self.candidates[name].standing is not None}

    def pending(self) -> list[Candidate]:
        """Return the candidates that are still to be tried."""
        return [candidate for candidate in self.candidates.values() if candidate.is_pending]

    def shown_gain(self, plan: Choices) -> float:
        """Return by how much a plan is faster than the plain loop at the least, as a ratio; 1 if that isn't known."""
        if plan and plan == self.closed_plan == self.plan and self.closing is not None:
            return max(1.0, self.closing.low)
        rows = [self.candidates[name].row for name, setting in plan.items() if self.plan.get(name, self) == setting]
        return math.prod(max(1.0, row.gain_low or 1.0) for row in rows if row.status == "kept")

    def note(self, text: str) -> None:
        """Record an event."""
        self.events.append(Event(step=self.steps, text=text))

    def break_even_step(self) -> int | None:
        """Return the step at which the search has paid for itself, or None if it never does."""
        if self.closed is None:
            return None
        saved = (self.closed.before_ms - self.closed.after_ms) / 1e3
        return self.searched_until + int(self.cost_s / saved) + 1 if saved > 0 else None


def _nothing_seen() -> Diagnosis:
    from accel.profiler.naming import diagnose  # with all its rules: not before a search begins

    return diagnose(Evidence())
