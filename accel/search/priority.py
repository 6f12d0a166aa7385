"""Which candidate comes next, which could gain too little to be tried, and which verdicts no longer hold."""

from __future__ import annotations

from accel.profiler.bottleneck import Bottleneck
from accel.search import costs, outlook
from accel.search.state import Candidate, CandidateStage, SearchState

_SHORTER = 1.25
"""Times as long as now that the step must have been."""
_OTHER_LIMIT = 2.0
"""Times as long as now: something else limits the step by then, such as the device, whose time launches had hidden."""
_MOST = 0.5
"""Share of the step from which on a cause takes most of it."""
_LEADING = 0.3
"""The same for what takes epochs to prepare: that begins before others spend the budget bit by bit."""
_MOST_TIMES = 2


def next_candidate(state: SearchState) -> Candidate | None:
    """Return which candidate is to be looked at next, of equals the first in the registry; None if all have to wait."""
    queued = [each for each in state.pending() if each.stage is CandidateStage.QUEUED or not why_pending(state, each)]
    return min(queued, key=lambda candidate: rank(state, candidate), default=None)


def rank(state: SearchState, candidate: Candidate) -> tuple[int, ...]:
    """Return what sorts candidates: cheap ones first, and among them what treats the present bottleneck.

    What treats a cause that takes most of the step comes before all else, unless the guard compares it first. What
    takes seconds once is cheap where steps are so slow that a trial takes as long. What takes epochs to prepare begins
    before others if it treats a large cause.
    On a crowded machine what depends on other processes comes last: they may have left by then.
    What has a place of its own (`TrialDesign.order`) keeps that: a comparison by the guard can make the heap grow for
    good, and then it is too late to see what the allocator gives. A small network's plain steps took 77 ms before one,
    and 46 after it.
    """
    findings = state.diagnosis.findings
    limits = [Bottleneck(finding.bottleneck) for finding in findings] + state.diagnosis.limits
    treated = (limits.index(limit) for limit in candidate.strategy.treats if limit in limits)
    again = candidate.at_length or bool(state.recollection.lost(candidate.name))
    return (
        again or candidate.is_compared or not _treats_most(state, candidate),
        candidate.design.order,
        again,
        candidate.design.depends_on_host and outlook.is_crowded(state),
        costs.is_dear(candidate) and costs.work_s(state, candidate) > costs.least_trial_s(state),
        not _leads(state, candidate),
        candidate.name not in [finding.strategy for finding in findings],
        candidate.is_compared,
        min(treated, default=len(limits)),
    )


def _treats_most(state: SearchState, candidate: Candidate, share: float = _MOST) -> bool:
    """Tell whether a candidate treats the first cause, if that takes more than a share of the step."""
    causes = state.diagnosis.findings[:1]
    return any(each.share > share and Bottleneck(each.bottleneck) in candidate.strategy.treats for each in causes)


def _leads(state: SearchState, candidate: Candidate) -> bool:
    """Tell whether work of a candidate in the loop should begin before others are tried: it takes long, gains most."""
    return (
        candidate.design.prepare is not None
        and not costs.is_dear(candidate)
        and costs.work_s(state, candidate) > 0
        and _treats_most(state, candidate, _LEADING)
    )


def _comes_after(state: SearchState, candidate: Candidate) -> str:
    """Say that another one's work is to begin first, once the run is at most twice as long; '' if none's."""
    if _leads(state, candidate):
        return ""
    leading = (other for other in state.pending() if _leads(state, other))
    soon = (each for each in leading if costs.steps_until_affordable(state, [each]) * state.step_s <= state.lasted_s)
    return next((f"{each.name}, which may gain more, begins first" for each in soon), "")


def why_pending(state: SearchState, candidate: Candidate) -> str:
    """Say why a candidate that applies can't be tried now; '' if it can. Begins what it waits for in the loop."""
    if why := state.recollection.postponed(candidate.name, state.elapsed_s):
        return why
    return costs.too_dear(state, candidate) or _comes_after(state, candidate) or waits_in_loop(state, candidate)


def waits_in_loop(state: SearchState, candidate: Candidate) -> str:
    """Ask what a candidate waits for in the loop; work that begins then, and is expected no more, is charged."""
    expected_s = costs.work_s(state, candidate)
    waits = candidate.waits()
    if waits and candidate.design.is_preparing and (begun_s := expected_s - costs.work_s(state, candidate)) > 0:
        state.cost_s += begun_s
        candidate.row.cost_s += begun_s
    return waits


def too_little(state: SearchState, candidate: Candidate) -> str:
    """Say why all that a candidate can shorten is too little of the step; '' if it is not."""
    return candidate.design.too_little(state.anatomy_after, state.config.drop_gain)


def reopen_verdicts(state: SearchState) -> None:
    """Let candidates that were not kept have their turn again where what they save may matter by now.

    A verdict holds for the step that it was made on, and is reopened when the step has become shorter.
    What saved 2 ms of 279 saves 3.5 % of 57.
    """
    for candidate in state.candidates.values():
        is_out = candidate.stage is CandidateStage.DECIDED and candidate.name not in state.plan
        if is_out and candidate.times_reopened < _MOST_TIMES and _may_matter(state, candidate):
            state.note(f"{candidate.name}: the step has become shorter since its verdict, which is reopened")
            candidate.queue_again()
            candidate.times_reopened += 1


def reopen_what_came_back(state: SearchState, step_s: float) -> None:
    """Queue candidates again that had too little to win, if what they treat takes more of the step by now, or may.

    Args:
        step_s: of the steps just seen.
    """
    for candidate in state.candidates.values():
        is_out = candidate.stage is CandidateStage.DECIDED and candidate.name not in state.plan
        why = _why_back(state, candidate, step_s) if is_out and candidate.times_reopened < _MOST_TIMES else ""
        if why:
            state.note(f"{candidate.name}: {why}; it has its turn again")
            candidate.queue_again()
            candidate.times_reopened += 1


def _why_back(state: SearchState, candidate: Candidate, step_s: float) -> str:
    row, design = candidate.row, candidate.design
    if row.status == "not tried":
        return "what it treats takes more of the step now" if design.has_come_back() else ""
    if design.may_grow and row.before_ms is not None and step_s * 1e3 > state.pace.slower * row.before_ms:
        return "the step has become slower since its verdict"
    return ""


def _may_matter(state: SearchState, candidate: Candidate) -> bool:
    """Tell whether the upper end of what a candidate saved, or the phase that it shortens, is enough of the step."""
    row, step_ms = candidate.row, state.step_s * 1e3
    if row.status == "not tried":  # it could win too little; else it has steps, of a check that could compare nothing
        return bool(candidate.design.phase) and not row.steps and not too_little(state, candidate)
    if row.before_ms is None or row.gain_high is None or row.before_ms < _SHORTER * step_ms:
        return False
    if row.before_ms >= _OTHER_LIMIT * step_ms or candidate.strategy.treats == {Bottleneck.LAUNCH}:
        return True  # with less work on the device the host may limit the step
    return row.before_ms * (1 - 1 / row.gain_high) > state.config.drop_gain * step_ms
