"""A finished plan: kept on and looked at now and then, until there is a reason to search again.

And what a strategy's own watch of the host wants: tried when other processes come, done without when they leave.
Neither the budget nor an earlier verdict holds that up: the one is for gains that may not come, the other was found
under another load. Only making once more what is made for calls as they are, such as a compiled graph, must be
affordable.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import replace

from accel.profiler.trial import Verdict
from accel.run.host_load import HostLoad
from accel.search import costs, priority, verdicts
from accel.search.actions import Action, Decisions, Result
from accel.search.experiment import act, close, trial, watching
from accel.search.outlook import ask_for_more
from accel.search.plan import Choices
from accel.search.state import Candidate, CandidateStage, SearchState
from accel.search.trying import try_settings
from accel.strategies.trial_design import TrialDesign

_WINDOW = 3


class StepLevel:
    """Learn the usual step time from three medians, and report when three in a row are slower.

    Args:
        slower: how many times the usual step time is slower.
    """

    def __init__(self, slower: float) -> None:
        self._slower = slower
        self._medians_ms: deque[float] = deque(maxlen=_WINDOW)
        self._usual_ms: float | None = None

    @property
    def is_open(self) -> bool:
        """True if the usual step time is not known yet, or the last median was slow: measure again soon."""
        if self._usual_ms is None:
            return True
        return bool(self._medians_ms) and self._medians_ms[-1] > self._slower * self._usual_ms

    def add(self, median_ms: float) -> str:
        """Add a median; return how the step became slower, '' if it did not."""
        self._medians_ms.append(median_ms)
        if len(self._medians_ms) < _WINDOW:
            return ""
        if self._usual_ms is None:
            self._usual_ms = statistics.median(self._medians_ms)
            self._medians_ms.clear()
            return ""
        fastest_ms = min(self._medians_ms)
        if fastest_ms <= self._slower * self._usual_ms:
            return ""
        self._medians_ms.clear()
        return f"the step became slower ({self._usual_ms:.3g} → {fastest_ms:.3g} ms)"

    def forget(self) -> None:
        """Learn the usual step time again; the latest medians count towards it."""
        self._usual_ms = None

    def begin_again(self) -> None:
        """Start over: what was measured ran under another plan."""
        self._usual_ms = None
        self._medians_ms.clear()


def hold(state: SearchState) -> Decisions:
    """Keep the plan on, checking it, until something can be tried that had to wait."""
    state.last_trial = None
    level, step_s, seconds = StepLevel(state.pace.slower), state.plain_s, list[float]()
    gap = state.pace.recheck  # from one later check by the guard to the next: ever larger
    next_check = state.steps + gap
    while True:
        yield from ask_for_more(state)
        if state.plan and state.steps >= next_check:
            yield from _check_again(state)
            gap *= 2
            next_check = state.steps + gap
            level.forget()
            continue
        times = state.growth.times
        is_preparing = any(candidate.comparison.is_preparing for candidate in state.pending())
        action = _next_look(state, level, next_check, step_s)
        result = yield from act(state, action, may_grow=True)
        step_s = statistics.median(result.seconds or [step_s])
        if state.growth.times != times:  # the plan is tried again soon
            next_check = min(next_check, state.steps + state.pace.recheck)
            level.begin_again()
            seconds.clear()
            continue
        plan = state.plan
        yield from follow(state)
        if state.replay is None and _waits_no_more(state):
            return
        if result.trips or state.plan != plan:
            level.begin_again()
            seconds.clear()
        elif state.plan and not is_preparing:  # else a step's time says nothing of the plan
            seconds += result.seconds
        if len(seconds) >= state.pace.hold:  # looks at the host may have come sooner
            slower = level.add(statistics.median(seconds) * 1e3)
            seconds.clear()
            if slower:
                state.note(f"{slower}: trying the plan again")
                yield from retry_kept(state, list(state.plan))
                level.forget()
        if state.replay is None and state.is_unclosed:
            yield from close(state)  # the closing trial was of a larger plan
            level.forget()
        verdicts.remember(state)


def _next_look(state: SearchState, level: StepLevel, next_check: int, step_s: float) -> Action:
    """Return the steps to measure, and those to let pass before them."""
    pace, pending = state.pace, state.pending()
    steps = pace.hold
    rest = pace.rest if state.plan or pending else pace.idle_rest(step_s)
    if state.plan and level.is_open:
        rest = 0
    if watching(state):
        steps, most = pace.hold_steps(step_s, steps)
        rest = min(rest, most)
    if state.plan:
        rest = max(0, min(rest, next_check - state.steps - steps))
    if state.replay is None:
        rest = int(min(rest, max(pace.observe, costs.steps_until_affordable(state, pending) - steps)))
    return Action(plan=state.plan, rest=rest, steps=steps, settled=True)


def _waits_no_more(state: SearchState) -> bool:
    """Tell whether something that waited can be tried now; what turns out not to apply waits no more."""
    for candidate in state.pending():
        if candidate.stage is CandidateStage.QUEUED or priority.can_be_tried(state, candidate):
            return True
        if why := candidate.refusal():
            verdicts.give_up(state, candidate, "not applicable", why)
    return False


def _check_again(state: SearchState) -> Decisions:
    """Let the guard look at the plan, undo it if that fails with each of the next batches, and try what is doubtful."""
    for again in range(state.pace.confirm + 1):
        action = Action(plan=state.plan, steps=1, check=dict(state.plan), settled=True)
        result = yield from act(state, action, may_grow=True)
        if result.finding is None or not result.finding.problem or not state.plan:
            break
        if again == state.pace.confirm:
            for name in list(state.plan):
                verdicts.remove(state, name, f"the guard's later check failed: {result.finding.problem}")
    if state.growth.is_unchecked:
        state.growth.is_unchecked = False
        yield from retry_kept(state, list(state.plan))
    else:
        # Step times don't show that the machine was busy during the search and is quiet now (or the reverse).
        names = [name for name in state.plan if state.candidates[name].comparison.depends_on_host]
        yield from retry_kept(state, names)


def retry_kept(state: SearchState, names: Iterable[str]) -> Decisions:
    """Try the plan without each of these in turn, and undo those that no longer pay.

    What stands by its own trial stays. So does that without which what is dear would have to be made once more, such as
    a compiled graph, while that, which comes first, is on; and what is there for other processes, while these are.
    """
    for candidate in sorted(map(state.candidates.__getitem__, names), key=lambda each: not costs.is_dear(each)):
        if candidate.name not in state.plan or candidate.standing is not None or candidate.comparison.stands:
            continue
        if costs.made_for_calls(state, candidate) is not None:
            continue
        watch = candidate.comparison.watch
        if candidate.before is not None and watch is not None and watch.are_here:
            continue
        yield from retry(state, candidate)


def retry(
    state: SearchState, candidate: Candidate, if_much_slower: Verdict | None = None
) -> Generator[Action, Result, Verdict | None]:
    """Try the plan without a strategy, undo that if it no longer pays, and return the verdict, if there is one.

    Args:
        if_much_slower: the verdict where its first steps are much slower than those without it.
    """
    name, plan = candidate.name, dict(state.plan)
    without: Choices = {n: setting for n, setting in plan.items() if n != name}
    result = yield from trial(
        state,
        TrialDesign(),
        without,
        plan,
        settle=candidate.comparison.settling(plan[name]),
        config=state.config.of_kept(),
        if_much_slower=if_much_slower,
    )
    if result is None or result.outcome is None:
        return None
    if result.outcome.verdict == "drop":
        why = f"it no longer pays: {result.outcome.gain:.2f}x when tried again at step {state.steps}"
        verdicts.remove(state, name, why, is_slower=True)
    return result.outcome.verdict


# -- out of turn -------------------------------------------------------------------------------------------------------


def follow(state: SearchState) -> Decisions:
    """Try what a watch of the host wants tried, or done without, now."""
    for candidate in watching(state):
        watch = candidate.comparison.watch
        assert watch is not None
        load, watch.news = watch.news, None
        if load is None:
            continue
        state.is_out_of_turn = True
        try:
            if load.is_quiet:
                yield from _without(state, candidate)
            else:
                yield from _beside(state, candidate, load)
        finally:
            state.is_out_of_turn = False
        if state.lasting_plan():
            state.last_trial = None  # it says nothing of these


def _beside(state: SearchState, candidate: Candidate, load: HostLoad) -> Decisions:
    """Try a strategy at length, for it is noisy here; only a keep counts.

    Its trial begins with it: plain steps are slow here, and in a run that ends soon there is time for nothing else.
    """
    name, watch = candidate.name, candidate.comparison.watch
    assert watch is not None
    if name in state.plan or candidate.has_failed():
        return
    candidate.settings_left = None  # the settings to be tried have changed with the load
    again_s = costs.work_s(state, candidate)
    if again_s and not costs.affordable(state, again_s):
        watch.not_kept()
        return
    before = candidate.row, candidate.stage
    candidate.before, watch.is_used = before, True
    candidate.withdraw()
    yield from try_settings(state, candidate, replace(state.config.early(), first="B"))
    candidate.settings_left = None
    if name in state.plan:
        candidate.row.why += f", beside {load.text}"
        state.note(f"{name} {candidate.row.setting} is kept for as long as there are {load.text}")
        state.say(f"other processes keep the machine busy: {name} {candidate.row.setting} until they leave")
        candidate.stage = CandidateStage.DECIDED
        verdicts.settle(state, candidate)
    else:
        verdicts.leave_out_of_turn(candidate)
        if not candidate.has_failed():
            verdicts.restore(candidate, before)
        else:
            verdicts.settle(state, candidate)


def _without(state: SearchState, candidate: Candidate) -> Decisions:
    """Try the plan without what was kept beside others."""
    state.note("the other processes have left: the plan is tried without what was kept beside them")
    verdict = yield from retry(state, candidate, if_much_slower="drop")
    watch = candidate.comparison.watch
    if candidate.name not in state.plan or watch is None:
        return
    if verdict == "keep":
        candidate.before, watch.is_used = None, False
        candidate.row.why += "; faster without them too"
    else:
        watch.left_open()
