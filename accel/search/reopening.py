"""A verdict holds for the step that it was made on: it is reopened when the step has become shorter."""

from __future__ import annotations

from accel.profiler.bottleneck import Bottleneck
from accel.search import priority
from accel.search.state import Candidate, CandidateStage, SearchState

_SHORTER = 1.25
"""Times as long as now that the step must have been."""
_OTHER_LIMIT = 2.0
"""Times as long as now: something else limits the step by then, such as the device, whose time launches had hidden."""
_MOST_TIMES = 2
"""How often the verdict on a candidate is reopened."""


def reopen_verdicts(state: SearchState) -> None:
    """Let candidates that were not kept have their turn again where what they save may matter by now.

    What saved 2 ms of 279 saves 3.5 % of 57.
    """
    for candidate in state.candidates.values():
        is_out = candidate.stage is CandidateStage.DECIDED and candidate.name not in state.plan
        if not is_out or candidate.times_reopened >= _MOST_TIMES or candidate.before is not None:
            continue
        candidate.judged_ms = candidate.judged_ms or candidate.row.before_ms or state.step_s * 1e3
        if candidate.judged_ms >= _SHORTER * state.step_s * 1e3 and _may_matter(state, candidate):
            state.note(f"{candidate.name}: the step has become shorter since its verdict, which is reopened")
            candidate.withdraw()
            candidate.stage, candidate.at_length, candidate.settings_left = CandidateStage.QUEUED, False, None
            candidate.times_reopened += 1
            candidate.judged_ms = 0.0


def _may_matter(state: SearchState, candidate: Candidate) -> bool:
    """Tell whether the upper end of what a candidate saved, or the phase that it shortens, is enough of the step."""
    row = candidate.row
    if row.status == "not tried":  # it could win too little; else it has steps, of a check that could compare nothing
        return bool(candidate.comparison.phase) and not row.steps and not priority.too_little(state, candidate)
    if row.status not in ("undone", "inconclusive") or row.before_ms is None or row.gain_high is None:
        return False
    if candidate.judged_ms >= _OTHER_LIMIT * state.step_s * 1e3 or candidate.strategy.treats == {Bottleneck.LAUNCH}:
        return True  # with less work on the device the host may limit the step
    return row.before_ms * (1 - 1 / row.gain_high) > state.config.drop_gain * state.step_s * 1e3
