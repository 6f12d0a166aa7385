"""Experiments on the run: an action, a look, a check by the guard, a trial, the closing trial; and what each costs."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace

from accel.errors import AccelError
from accel.profiler.trial import Outcome, TrialConfig, Verdict
from accel.profiler.trial_driver import Block, Steps, TrialResult, drive, together
from accel.search import costs, outlook, verdicts
from accel.search.actions import Action, Decisions, Result
from accel.search.plan import Choices
from accel.search.state import Candidate, CandidateStage, SearchState
from accel.strategies.trial_design import Terms, TrialDesign

_PAIRS = 6
"""Pairs of blocks that a closing trial has at the least, and so a trial that stands for it."""
_MOST_SAVED = 0.95
"""Share of a step that replays may seem to save at most."""
_IN_BLOCKS = TrialDesign()


class Interrupted(AccelError):
    """The conditions (batch shape, loader, world size, threads) are others: what was measured says nothing any more."""


class _Tripped(AccelError):
    """A strategy was switched off in a trial, whose steps say nothing then."""


def act(state: SearchState, action: Action, *, may_grow: bool = False) -> Generator[Action, Result, Result]:
    """Run an action, and book what it has cost.

    Args:
        may_grow: the batch controller may change the batch, unless what is on was made for calls as they were.

    Raises:
        Interrupted: if it ran under other conditions than the plan was measured for.
    """
    looks = state.elapsed_s >= state.next_look_s and bool(watching(state))
    result = yield replace(action, base=action.plan == state.plan, host=looks)
    state.steps += result.steps
    state.elapsed_s += result.elapsed_s + result.aside_s
    state.saved_s += result.elapsed_s * (state.shown_gain(action.plan) - 1)
    if state.searching:
        state.cost_s += result.aside_s
    if looks:
        state.next_look_s = state.elapsed_s + state.pace.until_look(result.load)
        for candidate in watching(state):
            if (watch := candidate.design.watch) is not None:
                watch.see(result.load)
    if _is_another_regime(state, result):
        state.regime = result.regime
        is_made_for_calls = any(state.candidates[name].design.is_made_for_calls for name in action.plan)
        if not (may_grow and result.has_new_batch) or is_made_for_calls:
            raise Interrupted
        state.new_batches += 1
    state.regime = result.regime if state.regime is None else state.regime
    for name, why in result.trips.items():
        _record_trip(state, name, f"{why} at step {state.steps}", action)
    return result


def watching(state: SearchState) -> list[Candidate]:
    """Return the candidates that apply and have a watch of the host; none where a plan is replayed."""
    if state.replay is not None:
        return []
    watched = (each for each in state.candidates.values() if each.stage is not CandidateStage.RULED_OUT)
    return [each for each in watched if each.design.watch is not None and not each.refusal()]


def has_news(state: SearchState) -> bool:
    """Tell whether a watch has seen a change on which nobody has acted yet."""
    watches = (candidate.design.watch for candidate in watching(state))
    return any(watch is not None and watch.news is not None for watch in watches)


def _is_another_regime(state: SearchState, result: Result) -> bool:
    both_known = state.regime is not None and result.regime is not None
    return both_known and result.regime != state.regime and state.reopened < state.pace.reopenings


def _record_trip(state: SearchState, name: str, why: str, action: Action) -> None:
    """Undo a strategy; where another setting of it was being tried, the kept one stays."""
    candidate, tried = state.candidates[name], {**action.plan, **(action.check or {})}
    if candidate.stage is CandidateStage.RULED_OUT:  # it was only replayed
        return
    if name in state.plan and name in tried and tried[name] != state.plan[name]:
        setting = candidate.describe(tried[name])
        state.note(f"{name} {setting} undone: {why}; {candidate.row.setting} stays")
        return
    verdicts.remove(state, name, why)
    candidate.stage = CandidateStage.FAILED


@contextlib.contextmanager
def searching(state: SearchState) -> Iterator[None]:
    """Let what is done in a block be a part of the search, at its cost, also once that is over."""
    before, state.searching = state.searching, True
    try:
        yield
    finally:
        state.searching = before


@contextlib.contextmanager
def charged_to(state: SearchState, candidate: Candidate | None = None) -> Iterator[None]:
    """Count the steps of a block of trials as the search's, and their cost as a candidate's, however it ends."""
    cost_s, steps = state.cost_s, state.steps
    try:
        yield
    finally:
        state.search_steps += state.steps - steps
        if candidate is not None:
            candidate.row.cost_s += state.cost_s - cost_s
            candidate.row.steps += state.steps - steps


def look(state: SearchState, *, rest: int = 0, steps: int = 0) -> Generator[Action, Result, Result]:
    """Observe some steps under the present plan: their anatomy, and what limits them."""
    from accel.profiler.diagnose import anatomy
    from accel.profiler.diagnose.step_times import wait_as_communication

    plan = dict(state.plan)
    result = yield from act(state, Action(plan=plan, rest=rest, steps=steps or state.pace.observe, anatomy=True))
    if result.measurements:
        wait_share = None if result.evidence is None else result.evidence.ddp_wait_share
        state.anatomy_after = anatomy.typical(wait_as_communication(result.measurements, wait_share))
        state.diagnosis, state.step_ms = result.diagnosis, state.reduce(result.seconds) * 1e3
    if not plan:
        state.anatomy_before, state.plain_diagnosis = dict(state.anatomy_after), state.diagnosis
        if result.seconds:
            state.plain_ms = state.reduce(result.seconds) * 1e3
    return result


def ask_for_more(state: SearchState) -> Decisions:
    """Replay the recorded call plainly and with what `allow` leaves out; note what that would gain.

    It never runs, and is not asked before the budget allows for it.
    """
    for candidate in outlook.left_out(state):
        if not costs.affordable(state, costs.check_s(state, candidate)):
            continue
        with searching(state):
            check = {candidate.name: candidate.settings()[0]}
            result = yield from act(state, Action(plan=state.plan, steps=state.pace.guard, check=check))
        name, finding = candidate.name, result.finding
        plain_s, with_s = (0.0, 0.0) if finding is None else finding.replays_s
        state.offers[name] = 1.0
        if plain_s > 0 and finding is not None and not finding.problem:
            # A call replayed cold takes longer than within the loop, where it is at most the whole step.
            saved = min(1.0, plain_s / state.plain_s) * (1 - with_s / plain_s)
            state.offers[name] = round(1 / (1 - min(_MOST_SAVED, saved)), 2)
        if state.offers[name] < outlook.LEAST:
            continue
        why = f"replays of the call would make a step about {state.offers[name]:.1f}x as fast"
        state.note(f"{name} is left out by allow=; {why}")


def check(state: SearchState, candidate: Candidate, trial_plan: Choices) -> Generator[Action, Result, bool]:
    """Let the guard compare a plan with a candidate with the plain path; return whether it may be tried."""
    if not candidate.is_compared:
        return True
    cost_s = state.cost_s
    # Where a watch wants it plain steps are slow, and what their replays show in one of them suffices.
    steps = 1 if candidate.design.watch is not None else state.pace.guard
    result = yield from act(state, Action(plan=state.plan, steps=steps, check=trial_plan))
    costs.note_check(state, candidate, result, state.cost_s - cost_s)
    finding, name = result.finding, candidate.name
    if name in result.trips:
        return False
    if finding is None:
        return True
    if (finding.problem or finding.unsure) and name in state.plan:  # another setting of it is kept
        setting = candidate.describe(trial_plan[name])
        why = f"is wrong: {finding.problem}" if finding.problem else f"was not compared: {finding.unsure}"
        state.note(f"{name} {setting} {why}; {candidate.row.setting} stays")
        return False
    verdicts.record_finding(candidate, finding)
    if finding.problem:
        verdicts.decide(state, candidate, "undone", f"wrong: {finding.problem}")
        candidate.stage = CandidateStage.FAILED
    elif finding.unsure:
        verdicts.decide(state, candidate, "not tried", f"the guard could compare nothing: {finding.unsure}")
    return not finding.problem and not finding.unsure


def check_whole(state: SearchState, plan: Choices, steps: int | None = None) -> Generator[Action, Result, str]:
    """Check a plan as a whole, usually before any of it is on; return what speaks against it, else ''.

    Args:
        steps: in which it is compared, if not as many as usual.
    """
    result = yield from act(state, Action(plan=state.plan, steps=steps or state.pace.guard, check=plan))
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
    candidates = [state.candidates[name] for name in plan]
    level = max(candidate.strategy.exactness for candidate in candidates)
    for candidate in candidates:
        if candidate.strategy.exactness == level:
            verdicts.record_finding(candidate, finding)
    return ""


def trial(
    state: SearchState,
    a: Choices,
    b: Choices,
    *,
    design: TrialDesign = _IN_BLOCKS,
    config: TrialConfig | None = None,
    if_much_slower: Verdict | None = None,
    limit_s: Callable[[], float] = lambda: math.inf,
) -> Generator[Action, Result, TrialResult | None]:
    """Compare plan `b` with plan `a`; None if a strategy tripped meanwhile.

    Args:
        config: the statistics, if not those of the search.
        if_much_slower: the verdict where the first steps of `b` are much slower.
        limit_s: tells what it may cost.
    """
    step_s = state.plain_s if a == state.standing_plan() != state.plan else state.step_s
    switched = [each for each in (a | b).items() if each not in a.items() or each not in b.items()]
    terms = Terms(
        config=(config or state.config).for_steps_of(step_s),
        settle=max(state.candidates[name].design.settling(setting) for name, setting in switched),
        reduce=state.reduce,
        step_s=max(step_s, 1e-4),
        if_much_slower=if_much_slower,
        limit_s=limit_s,
    )

    def run(block: Block) -> Generator[Action, Result, Steps]:
        plan = a if block.arm == "A" else b
        action = Action(plan=plan, steps=block.steps, settle=block.settle, whole_epoch=block.whole_epoch)
        result = yield from act(state, action)
        if result.trips:
            raise _Tripped
        settling = [step.seconds for step in result.settling]
        return Steps(seconds=result.seconds, settling=settling, drained=result.drained, phases=result.phases)

    try:
        result = yield from drive(design.trial(terms), run)
    except _Tripped:
        return None
    state.cost_s += result.cost_s
    if result.outcome is not None and not design.stands and state.searching:
        state.last_trial = dict(a), dict(b), result.outcome
    return result


def close(
    state: SearchState,
    what: str = "the plan as a whole",
    *,
    if_much_slower: Verdict | None = None,
    limit_s: Callable[[], float] = lambda: math.inf,
) -> Decisions:
    """Try the whole plan against the plain loop, and undo what is shown not to be faster.

    Each strategy of it has had its own trial, in this run or an earlier one. So where noise leaves this one open, and
    the plan looks faster, it stays.

    Args:
        what: the plan, in the reason for undoing it.
        if_much_slower: the verdict where its first steps are much slower.
        limit_s: what the trial may cost.
    """
    while state.plan:
        plan, standing = dict(state.plan), state.standing_plan()
        outcome = _known_outcome(state, plan, standing)
        if outcome is None and plan != standing:
            with charged_to(state):
                result = yield from trial(state, standing, plan, if_much_slower=if_much_slower, limit_s=limit_s)
            if result is None:
                continue  # a strategy tripped and is gone: close with the rest
            outcome = result.outcome
        # What stands has been measured by itself: the rest of the plan was tried on top of it.
        own = [state.candidates[name].standing for name in standing]
        outcomes = [each for each in (*own, outcome) if each is not None]
        state.closing, state.closed_plan = functools.reduce(together, outcomes), plan
        if outcome is None or outcome.verdict == "keep" or (outcome.verdict == "inconclusive" and outcome.gain > 1):
            yield from look(state)
            return
        for name in _first_undone(state, plan):
            why = f"{what} was not shown to be faster than plain in the closing trial"
            verdicts.remove(state, name, why, is_slower=True)


def _known_outcome(state: SearchState, plan: Choices, standing: Choices) -> Outcome | None:
    """Return the outcome of a plan against the plain loop, if the very last trial was of just that.

    Only the last one counts: of several candidates, the luckiest would be kept without a second trial.
    """
    last = state.last_trial
    if last is None or last[:2] != (standing, plan):
        return None
    return last[2] if last[2].verdict == "keep" and last[2].pairs >= _PAIRS else None


def _first_undone(state: SearchState, plan: Iterable[str]) -> list[str]:
    """Return what is undone of a plan that is not faster; the rest is tried once more without it.

    First what depends on the host (threads, workers): when other processes come or go it can lose more than all else
    gives. What stands by its own trial stays.
    """
    others = [name for name in plan if state.candidates[name].standing is None]
    loose = [name for name in others if state.candidates[name].design.depends_on_host]
    return loose if loose and len(loose) < len(others) else others
