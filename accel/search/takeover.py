"""Plans from outside: one that is replayed, and what an earlier run has found."""

from __future__ import annotations

from accel.profiler.trial_driver import TrialResult
from accel.search import costs, verdicts
from accel.search.actions import Decisions
from accel.search.experiment import charged_to, check, check_whole, close, has_news, look
from accel.search.plan import Choices
from accel.search.state import CandidateStage, SearchState
from accel.search.trying import consider


def take_over(state: SearchState, choices: Choices) -> Decisions:
    """Switch a replayed plan on, strategy by strategy, each after the guard's check."""
    for name, setting in choices.items():
        candidate = state.candidates[name]
        if why := candidate.ruled_out[1] if candidate.ruled_out else candidate.refusal():
            verdicts.decide(state, candidate, "not applicable", why)
            continue
        candidate.row.setting = candidate.describe(setting)
        if (yield from check(state, candidate, {**state.plan, name: setting})):
            state.plan = {**state.plan, name: setting}
            verdicts.decide(state, candidate, "kept", "taken over from the plan, without a trial")


def recall(state: SearchState) -> Decisions:
    """Try what an earlier run has found, as a whole; unless it is shown to be faster once more, it is undone.

    What has a trial of its own kind is tried by that: before the rest, or in its turn.
    """
    memory = state.recollection
    memory.recall()
    plan = memory.choices(state.candidates)
    if memory.text:
        state.note(f"remembered {memory.text}")
        state.say(f"remembered {memory.text}")
    for candidate in [state.candidates[name] for name in plan]:
        candidate.row.setting = candidate.describe(plan[candidate.name])
        if candidate.comparison.order < 0 and not has_news(state):  # that can't wait for so long a trial
            yield from consider(state, candidate)
    whole = {name: setting for name, setting in plan.items() if not state.candidates[name].comparison.order}
    if suggested := _affordable_part(state, whole):
        memory.begin_check([name for name in whole if name not in suggested])
        yield from _check_suggested(state, suggested)


def _affordable_part(state: SearchState, plan: Choices) -> Choices:
    """Return the part of a plan whose one-off work the budget allows for, if this run is as long as the last one."""
    memory, in_all_s = state.recollection, 0.0
    is_affordable = costs.affordable_in(state, memory.run_s, memory.saved_s)
    one_off_s = {name: costs.work_of(state, state.candidates[name], setting) for name, setting in plan.items()}
    waiting = set()
    for name in sorted(plan, key=one_off_s.__getitem__):
        in_all_s += one_off_s[name]
        if one_off_s[name] >= costs.DEAR_S and not is_affordable(in_all_s):
            waiting.add(name)
    return {name: setting for name, setting in plan.items() if name not in waiting}


def _check_suggested(state: SearchState, plan: Choices) -> Decisions:
    memory, standing, cost_s = state.recollection, state.standing_plan(), state.cost_s
    only = state.candidates[next(iter(plan))] if len(plan) == 1 else None
    with charged_to(state, only):
        problem = yield from check_whole(state, plan)
    dear = [state.candidates[name] for name in plan if costs.is_dear(state.candidates[name])]
    if len(dear) == 1:
        costs.note_work(state, dear[0], plan[dear[0].name], state.cost_s - cost_s)
    if problem:
        memory.reject(problem)
        return
    for name in plan:
        state.candidates[name].stage = CandidateStage.DECIDED
        memory.tried.add(name)
    state.plan = {**standing, **plan}
    yield from look(state)
    yield from close(state, "the remembered plan")
    missing = [state.candidates[name] for name in plan if name not in state.plan]
    if not missing:
        _confirm(state, plan)
        return
    kept = [name for name in plan if name in state.plan]
    faster = f"only {', '.join(kept)} was" if kept else "it was not"
    memory.reject(f"{faster} shown to be faster than plain")
    for candidate in missing:
        if not candidate.has_failed():  # the search is to try it, whatever has been decided so far
            candidate.withdraw()
            candidate.stage = CandidateStage.QUEUED
    state.closing, state.closed_plan = None, {}


def _confirm(state: SearchState, plan: Choices) -> None:
    """Record that the closing trial has shown the remembered plan to be faster."""
    state.recollection.confirm()
    for name in plan:
        candidate = state.candidates[name]
        if state.closing is not None and list(state.plan) == [name]:
            verdicts.judge(state, candidate, plan[name], TrialResult(state.closing))
        why = verdicts.with_draws(candidate, state.recollection.reason())
        verdicts.decide(state, candidate, "kept", why)
    verdicts.remember(state)
