"""Which candidate comes next, and which could gain too little to be tried."""

from __future__ import annotations

from accel.profiler.bottleneck import Bottleneck
from accel.search import costs
from accel.search.state import Candidate, CandidateStage, SearchState


def next_candidate(state: SearchState) -> Candidate | None:
    """Return which candidate is to be looked at next; None if there is none, or all others have to wait."""
    queued = [each for each in state.pending() if each.stage is CandidateStage.QUEUED or can_be_tried(state, each)]
    return min(queued, key=lambda candidate: rank(state, candidate), default=None)


def rank(state: SearchState, candidate: Candidate) -> tuple[int, bool, bool, bool, bool, int, int]:
    """Return what sorts candidates: cheap ones first, and among them what treats the present bottleneck.

    What has a place of its own (`TrialDesign.order`) keeps that: a comparison by the guard can make the heap grow for
    good, and then it is too late to see what the allocator gives. A small network's plain steps took 77 ms before one,
    and 46 after it.
    """
    findings = state.diagnosis.findings
    limits = [Bottleneck(finding.bottleneck) for finding in findings] + state.diagnosis.limits
    treated = (limits.index(limit) for limit in candidate.strategy.treats if limit in limits)
    return (
        candidate.comparison.order,
        candidate.at_length or bool(state.recollection.lost(candidate.name)),
        costs.is_dear(candidate),
        candidate.name not in [finding.strategy for finding in findings],
        candidate.is_compared,
        min(treated, default=len(limits)),
        candidate.order,
    )


def why_pending(state: SearchState, candidate: Candidate) -> str:
    """Say why a candidate that applies can't be tried now; '' if it can. Begins what it waits for in the loop."""
    if why := state.recollection.postponed(candidate.name, state.elapsed_s):
        return why
    return costs.too_dear(state, candidate) or waits_in_loop(state, candidate)


def can_be_tried(state: SearchState, candidate: Candidate) -> bool:
    """Tell whether a candidate that had to wait can be tried now."""
    return not why_pending(state, candidate)


def waits_in_loop(state: SearchState, candidate: Candidate) -> str:
    """Ask what a candidate waits for in the loop; work that begins then, and is expected no more, is charged."""
    expected_s = costs.work_s(state, candidate)
    waits = candidate.waits()
    if waits and candidate.comparison.is_preparing and (begun_s := expected_s - costs.work_s(state, candidate)) > 0:
        state.cost_s += begun_s
        candidate.row.cost_s += begun_s
    return waits


def too_little(state: SearchState, candidate: Candidate) -> str:
    """Say why all that a candidate can shorten is too little of the step; '' if it is not."""
    return candidate.comparison.too_little(state.anatomy_after, state.config.drop_gain)


def is_urgent(state: SearchState, candidate: Candidate) -> bool:
    """Tell whether what it can shorten is so much of the step that its gain stands out from any noise."""
    return (candidate.comparison.share(state.anatomy_after) or 0.0) >= state.pace.urgent


def shows_when_crowded(state: SearchState, candidate: Candidate) -> bool:
    """Tell whether its gain shows beside other processes: it doesn't depend on them, or is large."""
    if is_urgent(state, candidate):
        return True
    comparison = candidate.comparison
    is_free = not comparison.depends_on_host and not costs.is_dear(candidate) and comparison.order <= 0
    return is_free and not too_little(state, candidate)
