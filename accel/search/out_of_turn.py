"""What a strategy's own watch of the host wants: tried when other processes come, done without when they leave.

Neither the budget nor an earlier verdict holds that up: the one is for gains that may not come, the other was found
under another load. Only making once more what is made for calls as they are, such as a compiled graph, must be
affordable.
"""

from __future__ import annotations

from dataclasses import replace

from accel.run.host_load import HostLoad
from accel.search import costs, verdicts
from accel.search.experiment import Decisions, watching
from accel.search.holding import retry
from accel.search.state import Candidate, CandidateStage, SearchState
from accel.search.trying import try_settings


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
