"""The controller: name the bottleneck, try what treats it, keep or undo, try the whole plan, keep watching.

It is a generator that yields an `Action` and is sent its `Result`. It knows nothing of models, loaders or clocks, so
tests can drive it with a simulated loop.

    observe ──▶ search ──▶ closing trial ──▶ hold ──┐
                  ▲                                 │ other batch shape, world size, threads; an expensive candidate
                  └─────────────────────────────────┘ has become affordable; a kept strategy has become slower
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

from accel.profiler import naming
from accel.profiler.diagnose import causes
from accel.profiler.trial import Outcome, TrialConfig
from accel.report import StrategyRow
from accel.search import priority
from accel.search.actions import Action, Candidate, Result
from accel.search.batch_growth import BatchGrowth
from accel.search.budget import Budget
from accel.search.candidate_trials import COMPARING
from accel.search.experiments import Decisions
from accel.search.host_load import SHORTEST_LOOK_S, Neighbours
from accel.search.ledger import refusal, waiting_for
from accel.search.one_off import Preparations
from accel.search.pace import Pace
from accel.search.plan import Choices
from accel.search.remembered import PlanMemory, Recollection
from accel.search.shared_host import SharedHost
from accel.search.step_level import StepLevel

_SILENT_S = 60.0
"""How long a run may be too young for a first trial without a word of that, s."""
_GLANCE = 2
"""Steps after which the host is looked at for the first time, if they take long enough."""


class Controller(SharedHost):
    """Choose strategies on real training steps.

    Args:
        candidates, budget, config, pace, reduce, announce: as for `Experiments`.
        say: prints one line for the user; a line is printed only once.
        replay: choices to take over from a plan, without a search.
        memory: keeps what is found from run to run; None remembers nothing.
        startup_s: tells what accel's start has cost the run before the search, s.
        ran_s: tells how long the run had lasted by then, s.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        *,
        budget: Budget,
        config: TrialConfig | None = None,
        pace: Pace | None = None,
        reduce: Callable[[Sequence[float]], float] = statistics.median,
        announce: Callable[[StrategyRow, int, int], None] = lambda row, done, total: None,
        say: Callable[[str], None] = lambda line: None,
        replay: Choices | None = None,
        memory: PlanMemory | None = None,
        startup_s: Callable[[], float] = lambda: 0.0,
        ran_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        super().__init__(
            candidates,
            Recollection(memory, candidates),
            budget,
            config=config,
            pace=pace,
            reduce=reduce,
            announce=announce,
        )
        self._say = say
        self._replay, self._follows_host = replay, replay is None
        self._startup_s, self._ran_s = startup_s, ran_s
        self.anatomy_before: dict[str, float] = {}
        self.plain_diagnosis = self.diagnosis
        """The verdict on the plain loop."""
        self.searched_until = 0
        """Step at which the last search ended."""
        self._growth = BatchGrowth()
        self._postponed: set[str] = set()
        self._preparations = Preparations(candidates)

    # -- the loop of the search --------------------------------------------------------------------------------------

    def decisions(self) -> Decisions:
        """Yield actions for as long as the run lasts."""
        self.elapsed_s = self.cost_s = self._startup_s()
        self._before_s = max(0.0, self._ran_s() - self.cost_s)
        yield from self._observe()
        while True:
            if self._is_interrupted():
                yield from self._reopen()
                continue
            if self._replay is not None:
                yield from self._take_over(self._replay)
            else:
                yield from self._search()
                if not self._is_interrupted() and (self.closing is None or self.plan != self._closed):
                    yield from self._close()
            if not self._is_interrupted():
                self.searching = False
                self._passed = {name: plan for name, plan in self._passed.items() if name in self.plan}
                self.searched_until = self.steps
                self.remember()
                yield from self._hold()
                self.searching = True

    def _observe(self) -> Decisions:
        if self._freeing():
            yield from self._glance()
            if self._is_interrupted():
                return
        for waits in range(self._pace.crowded_looks + 1):
            rest = self._pace.crowded_rest(self.plain_ms / 1e3) if waits else 0
            plan = dict(self.plan)
            result = yield from self._act(Action(plan=plan, rest=rest, steps=self._pace.observe, anatomy=True))
            self._regime = result.regime
            self._record_anatomy(result)
            if not plan:
                self.anatomy_before, self.plain_diagnosis = dict(self.anatomy_after), self.diagnosis
                if result.seconds:
                    self.plain_ms = self._reduce(result.seconds) * 1e3
                if not waits:
                    self._keep_what_has_lasted()
            if not waits and self._replay is None:
                yield from self._recall(result.seconds)
            if not self._is_interrupted():
                yield from self._follow_load()
            if not (waits or self.plan or self._is_interrupted() or self._replay is not None):
                yield from self._begin_affordably()
                yield from self._follow_load()
            if self._is_interrupted():
                return
            if self._replay is not None:  # it measures nothing that a crowded machine could hide
                break
            if not _is_crowded(self.diagnosis) or self._only_losers_are_left():
                break
            if waits == self._pace.crowded_looks:
                self._note("the machine is crowded: the search begins anyway")
                break
            self._note("the machine is crowded: the search waits")
            if not waits:
                self._say("other processes keep the machine busy: what that would hide or distort is tried later")
            yield from self._try_at_once()
            if self._is_interrupted():
                return
            self._blocks_outcome = None  # the closing trial is to see the quiet machine

        for name, candidate in self._candidates.items():
            if self.rows[name].status == "not allowed" and (why := refusal(candidate)):
                self._ledger.decide(name, "not applicable", why)

    def _glance(self) -> Decisions:
        """Look at the host first of all: where threads wait for each other, steps are too slow to observe many."""
        result = yield from self._act(Action(plan={}, steps=_GLANCE, anatomy=True))
        self._regime = result.regime
        self._record_anatomy(result)
        self.anatomy_before, self.plain_diagnosis = dict(self.anatomy_after), self.diagnosis
        self.plain_ms = self._reduce(result.seconds or [0.0]) * 1e3
        if result.load is None and self.plain_ms > 0:
            rest = min(self._pace.recheck, math.ceil(SHORTEST_LOOK_S * 1e3 / self.plain_ms))
            if self._changed((yield from self._act(Action(plan={}, rest=rest, steps=1)))):
                return
        if self._neighbours.news is not None:
            self.recollection.recall()
            if not self.recollection.text:  # else the remembered plan comes first
                yield from self._follow_load()

    def _begin_affordably(self) -> Decisions:
        """Let the loop run until the budget allows for more than accel's start has taken, and look at it anew."""
        from_s = self._budget.allowed_from(spent=self.cost_s, expected=0.0, saved=self.saved_s)
        if not self._lasted_s < from_s < math.inf or self.plain_ms <= 0:
            return
        while (wait_s := from_s - self._lasted_s) > 0 and self._neighbours.news is None:
            # In pieces: a run may end before, and what is known is kept.
            rest = min(self._pace.rest, math.ceil(wait_s / (self.plain_ms / 1e3)))
            if self._freeing():
                rest = min(rest, self._pace.hold_steps(self.plain_ms / 1e3, 1)[1])
            if self._changed((yield from self._act(Action(plan=self.plan, rest=rest, steps=1)))):
                return
        result = yield from self._act(Action(plan=self.plan, steps=self._pace.observe, anatomy=True))
        if self._changed(result):
            return
        self._record_anatomy(result)
        self.anatomy_before, self.plain_diagnosis = dict(self.anatomy_after), self.diagnosis
        self.plain_ms = self._reduce(result.seconds) * 1e3

    def _only_losers_are_left(self) -> bool:
        """Return whether an earlier run leaves nothing to try now: then there is no reason to wait."""
        pending = [self._candidates[name] for name in self._pending]
        return bool(self.recollection.text) and not any(self._may_be_tried_now(c) and not refusal(c) for c in pending)

    def _try_at_once(self) -> Decisions:
        """Try in brief what a crowded machine hides least.

        Only a 'keep' counts: a gain that the noise may have hidden is tried again later.
        """
        names, waiting = list(self._pending) if self._replay is None else [], list[str]()
        names.sort(key=lambda name: not self._candidates[name].lasting)  # see `priority.rank`
        names = [name for name in names if not self._candidates[name].frees_cores]  # in `_follow_load`
        while names or (names := [name for name in waiting if self._is_ready(name)]):
            yield from self._follow_load()
            if self._is_interrupted():
                return
            waiting = [name for name in waiting if name not in names]
            candidate = self._candidates[name := names.pop(0)]
            if candidate.lasting and self.steps > self._looked_at and not refusal(candidate):
                yield from self._measure_anatomy()
            faulting = None if name in self._lasting else self.faulting
            shows = priority.shows_when_crowded(
                candidate, self.anatomy_after, self._config.drop_gain, self._pace, faulting
            )
            if not shows or refusal(candidate) or not self._may_be_tried_at_once(candidate):
                continue
            if self._waiting_for(candidate):
                waiting.append(name)
                continue
            brief = None if candidate.lasting else self._brief  # if its effect lasts, that trial is its only one
            yield from self._try(candidate, brief or self._config)
            if self._is_interrupted():
                return
            row = self.rows[name]
            if row.status == "kept" or row.gain is None or candidate.lasting:  # kept, or wrong or failing
                self._pending = [other for other in self._pending if other != name]
                self._ledger.settle(name)
            else:
                self._ledger.withdraw(name)

    # -- search ------------------------------------------------------------------------------------------------------

    def _search(self) -> Decisions:
        for candidate in [self._candidates[name] for name in self._pending]:
            # One-off work beside the loop costs something: that begins in its turn.
            if not candidate.one_off_s and not refusal(candidate) and not self._too_little(candidate):
                waiting_for(candidate)  # begins what that takes, which costs next to nothing, while others are tried
        waiting: list[str] = []
        while self._pending:
            yield from self._follow_load()
            if self._is_interrupted():
                return
            if not self._pending:
                break
            name = priority.first(self._pending, self._candidates, self._put_off(), self.diagnosis)
            self._pending.remove(name)
            candidate = self._candidates[name]
            if candidate.lasting and self.steps > self._looked_at and self._is_ready(name) and not refusal(candidate):
                yield from self._measure_anatomy()  # what was done since may have made the heap grow
            expected_s = self._expected_s(candidate)
            why = refusal(candidate)
            if name in self._left and (why or not self._is_ready(name)):
                waiting += [] if why else [name]  # the verdict on its other settings stands
            elif why:
                self._ledger.decide(name, "not applicable", why)
            elif too_little := self._too_little(candidate):
                self._decide_unless_kept(name, "not tried", too_little)
            elif postponed := self.recollection.postponed(name, self.elapsed_s):
                self._ledger.decide(name, "not tried", postponed)
                waiting.append(name)
            elif not self._affordable(expected_s):
                one_off_s = self._one_off_s(candidate)
                work = "one-off work" if one_off_s else COMPARING
                why = self._budget.too_dear(self.cost_s, one_off_s or expected_s, work)
                self._ledger.decide(name, "not tried", why)
                waiting.append(name)
            elif self._waiting_for(candidate):
                if impossible := refusal(candidate):  # as has turned out only now
                    self._ledger.decide(name, "not applicable", impossible)
                else:
                    waiting.append(name)
            elif (of_epoch := (yield from self._too_little_of_epoch(candidate))) is None:
                return
            elif of_epoch:
                self._decide_unless_kept(name, "not tried", of_epoch)
            else:
                yield from self._try_or_postpone(candidate)
                if self._is_interrupted():
                    return
                waiting += [name] if name in self._left and name not in self._pending else []
            self._pending += [other for other in waiting if self._is_ready(other)]
            waiting = [other for other in waiting if other not in self._pending]
            if not self._pending and (steps := self._steps_until_affordable(waiting)) <= self._pace.patience:
                result = yield from self._act(Action(plan=self.plan, rest=int(steps), steps=1))
                if self._changed(result):
                    return
                self._pending = [other for other in waiting if self._is_ready(other)]
                waiting = [other for other in waiting if other not in self._pending]
        self._pending = waiting
        yield from self._follow_load()

    def _try_or_postpone(self, candidate: Candidate) -> Decisions:
        """Try a candidate in brief, and at length once all others have been tried: noise must not hold them up."""
        name = candidate.name
        # What saves page faults can't wait: comparisons with others make the heap grow.
        at_once = candidate.by_epoch() or candidate.lasting or name in self._postponed
        brief = None if at_once else self._brief
        config = brief or (self._config.at_length() if self._brief else self._config)
        yield from self._try(candidate, config, limited=True)
        if self._is_interrupted():
            return
        if name in self._tripped:
            return
        is_open = brief is not None and self._ledger.is_open(name)
        if is_open or name in self._left:
            # It will be asked again whether it applies. A trial may have ended with it on, and then it can't tell.
            result = yield from self._act(Action(plan=self.plan, steps=1))
            if self._changed(result) or name in result.trips:
                return
        if is_open:
            self._ledger.withdraw(name)
            self._left.forget(name)
            self._postponed.add(name)
            self._pending.append(name)
        elif self._neighbours.news is None:  # else its trial was left for that
            self._ledger.settle(name)

    def _too_little_of_epoch(self, candidate: Candidate) -> Generator[Action, Result, str | None]:
        """Say the same of what takes effect when an epoch begins, after an epoch; None if the regime changed."""
        if not candidate.by_epoch() or not candidate.phase:
            return ""
        result = yield from self._act(Action(plan=self.plan, whole_epoch=True))
        return (
            None if self._changed(result) else priority.too_little_of_epoch(candidate, result, self._config.drop_gain)
        )

    def _put_off(self) -> set[str]:
        """Return what comes last: what stayed undecided in brief, and what gave nothing in an earlier run."""
        return {*self._postponed, *(name for name in self._pending if self.recollection.lost(name))}

    # -- hold --------------------------------------------------------------------------------------------------------

    def _hold(self) -> Decisions:
        """Keep the plan on, checking it, until there is a reason to search again."""
        self._blocks_outcome = None
        level, step_s, seconds = StepLevel(self._pace.slower), self.plain_ms / 1e3, list[float]()
        gap, next_check = self._pace.recheck, self.steps + self._pace.recheck
        while True:
            check = dict(self.plan) if self.plan and self.steps >= next_check else None
            preparing = self._preparations.under_way(self._charged)
            steps = 1 if check else self._pace.observe if preparing else self._pace.hold
            idle = self._pace.rest if self.plan or self._pending else self._pace.idle_rest(step_s)
            rest = 0 if check or preparing or (self.plan and level.is_open) else idle
            if self._freeing() and not check:
                steps, most = self._pace.hold_steps(step_s, steps)
                rest = min(rest, most)
            if self.plan:
                rest = max(0, min(rest, next_check - self.steps - steps))
            if self._replay is None:
                rest = int(min(rest, max(self._pace.observe, self._steps_until_affordable(self._pending) - steps)))
            result = yield from self._act(Action(plan=self.plan, rest=rest, steps=steps, check=check, settled=True))
            step_s = statistics.median(result.seconds or [step_s])
            if check:
                gap, next_check = 2 * gap, self.steps + 2 * gap
                yield from self._recheck_numbers(result)
                yield from self._retry_kept([] if self._is_interrupted() else self._doubtful())
                if self._is_interrupted():
                    return
                level.forget()
                continue
            if self._goes_on_with(result):
                next_check = min(next_check, self.steps + self._pace.recheck)
                level.begin_anew()
                seconds.clear()
                continue
            if self._changed(result):
                return
            if preparing and not result.trips:
                self._count_preparation(preparing, result)
            plan = self.plan
            yield from self._follow_load()
            if self._is_interrupted():
                return
            if self._replay is None and self._waits_no_more():
                return
            if result.trips or self.plan != plan:
                level.begin_anew()
                seconds.clear()
            elif self.plan and not preparing:  # else a step's time says nothing of the plan
                seconds += result.seconds
            if len(seconds) >= self._pace.hold:  # looks at the host may have come sooner
                slower = level.add(statistics.median(seconds) * 1e3)
                seconds.clear()
                if slower:
                    self._note(f"{slower}: trying the plan again")
                    yield from self._retry_kept(list(self.plan))
                    level.forget()
            if self._replay is None and self._is_unclosed() and not self._is_interrupted():
                yield from self._close()  # the closing trial measured a larger plan
                level.forget()
            if self._is_interrupted():
                return
            self.remember()

    def _count_preparation(self, name: str, result: Result) -> None:
        """Count what the steps took longer beside a preparation, as a cost of its candidate."""
        usual_ms = self.plain_ms if self.closed is None else self.closed.after_ms
        cost_s = self._preparations.count(name, result, usual_ms / 1e3)
        self.cost_s += cost_s
        self.rows[name].cost_s += cost_s
        waiting_for(self._candidates[name])  # notices that it has ended
        if self._preparations.under_way(self._charged) != name and (outcome := self._preparations.outcome(name)):
            self._note(outcome)

    def _reopen(self) -> Decisions:
        """Search again from the plain loop: the measurements were made under other conditions."""
        self._note("the loader, batch shape, world size or thread count changed: searching again")
        if self._ledger.has_announced:
            self._say("the loader, the batch shape or the thread count changed: the search begins anew")
        self._regime_changed = False
        self._reopened += 1
        self._growth = BatchGrowth()
        self.remember()  # what was found under the earlier conditions
        self.plan, self.closing, self._closed, self._epochs_outcome, self._blocks_outcome = {}, None, {}, None, None
        self._ledger.begin_anew()
        self._postponed, self._passed, self._next_trial_s = set(), {}, {}
        self._neighbours = Neighbours()
        self._charged = {name for name in self._charged if self._candidates[name].is_preparing()}
        self._left.forget()
        self._tripped.clear()
        self._pending = [name for name, c in self._candidates.items() if c.ruled_out is None]
        yield from self._observe()

    def _keep_what_has_lasted(self) -> None:
        """Of what was kept under other conditions the gain is known still, unless plain steps fault again without it.

        Else the plain steps just observed have it, too.
        """
        faults_again = self.faulting is not None and self.faulting >= self._config.drop_gain
        self._lasting = {
            name: replace(outcome, before_ms=self.plain_ms * outcome.gain, after_ms=self.plain_ms)
            for name, outcome in self._lasting.items()
            if not faults_again and (not outcome.in_turns or self.faulting is None)
        }

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _is_unclosed(self) -> bool:
        """Tell whether the plan needs a closing trial; what came for other processes, after that trial, doesn't."""
        return bool(self.plan) and (not self._closed or self._closed not in (self.plan, self._quiet_plan()))

    @property
    def reopened(self) -> int:
        """How often the search has begun again from the plain loop."""
        return self._reopened

    @property
    def closed(self) -> Outcome | None:
        """The closing trial, if it was of the plan that is on: not once a part of that was undone, or one added."""
        return self.closing if self.plan and not self._is_unclosed() else None

    @property
    def has_tried(self) -> bool:
        """True if there is anything to tell of trials."""
        return any(row.steps or row.status in ("kept", "undone") for row in self.rows.values())

    @property
    def is_too_early(self) -> bool:
        """True in the first minute while nothing has been tried, and something may be tried later in this run."""
        if self._replay is not None or self.elapsed_s > _SILENT_S or self.has_tried:
            return False
        waiting = [name for name in self._pending if not self.recollection.postponed(name, self.elapsed_s)]
        expected = (self._expected_s(self._candidates[name]) for name in waiting)
        return not all(self._budget.exhausted(self.cost_s, seconds) for seconds in expected)

    def break_even_step(self) -> int | None:
        """Return the step at which the search has paid for itself, or None if it never does."""
        if self.closed is None:
            return None
        saved = (self.closed.before_ms - self.closed.after_ms) / 1e3
        return self.searched_until + int(self.cost_s / saved) + 1 if saved > 0 else None


def _is_crowded(diagnosis: naming.Diagnosis) -> bool:
    return diagnosis.crowd is not None and diagnosis.crowd.cause == causes.OVERSUBSCRIBED
